"""What the gateway benchmark consists of: a workload, an engine that costs nothing, a client, a floor to compare with."""
