#!/usr/bin/env bash
# Starts Podman's Docker-compatible API for the tests of the `docker` backend and prints its DOCKER_HOST. Run again, it
# prints the address of the service that runs already. With --install, gets Podman by apt first. Exit 1 where there can
# be none.
set -euo pipefail
install=
[ "${1:-}" = --install ] && install=yes && shift
state=${1:-${XDG_RUNTIME_DIR:-/run}/sandlot-podman}
socket=$state/podman.sock
mkdir -p "$state"
answers() { [ -S "$socket" ] && curl -sf --max-time 5 --unix-socket "$socket" http://d/_ping >/dev/null; }
if answers; then
    echo "unix://$socket"
    exit 0
fi
if ! command -v podman >/dev/null || ! command -v runc >/dev/null; then
    if [ -z "$install" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "podman and runc are not installed; on Debian, as root: $0 --install" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && apt-get install -qy --no-install-recommends podman runc catatonit; } >&2
fi
# runc and cgroupfs work in plain virtual machines and on hybrid cgroups, where crun and systemd do not; ulimits are named
# because a root without CAP_SYS_RESOURCE may not raise the inherited ones.
cat >"$state/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
export CONTAINERS_CONF=$state/containers.conf
rm -f "$socket"
setsid -f podman system service --time=0 "unix://$socket" >"$state/log" 2>&1 </dev/null
for _ in $(seq 100); do
    if answers; then
        echo "unix://$socket"
        exit 0
    fi
    sleep 0.1
done
echo "podman's service did not answer; its log:" >&2
tail -5 "$state/log" >&2
exit 1
