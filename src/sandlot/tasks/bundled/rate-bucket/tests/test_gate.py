from dripgate import Gate


def test_clients_do_not_share():
    gate = Gate(rate=1, burst=1, clock=lambda: 0.0)
    assert gate.allow("a")
    assert gate.allow("b")
    assert not gate.allow("a")


def test_sweep_forgets_full_buckets():
    now = [0.0]
    gate = Gate(rate=1, burst=1, clock=lambda: now[0])
    gate.allow("a")
    now[0] = 5.0
    gate.allow("b")
    gate.sweep()
    assert len(gate) == 1
    assert gate.retry_after("a") == 0.0
