#!/usr/bin/env bash
# Starts Podman's Docker-compatible API for the tests of the `docker` backend and prints its DOCKER_HOST. Run again, it
# prints the address of the service that runs already. With --install, gets Podman by apt first; with --stop, ends the
# service. Exit 1 where there can be none.
# usage: podman-service.sh [--install | --stop] [DIRECTORY of the service's socket and log]
set -euo pipefail
what=
case ${1:-} in --*) what=$1 && shift ;; esac
state=${1:-${XDG_RUNTIME_DIR:-/run}/sandlot-podman}
socket=$state/podman.sock
if [ "$what" = --stop ]; then
    # The number may be another process's by now.
    if pid=$(cat "$state/pid" 2>/dev/null) && grep -qzx "unix://$socket" "/proc/$pid/cmdline" 2>/dev/null; then
        kill "$pid"
    fi
    rm -f "$socket" "$state/pid"
    exit 0
fi
mkdir -p "$state"
answers() { [ -S "$socket" ] && curl -sf --max-time 5 --unix-socket "$socket" http://d/_ping >/dev/null; }
if answers; then
    echo "unix://$socket"
    exit 0
fi
if ! command -v podman >/dev/null || ! command -v runc >/dev/null; then
    if [ "$what" != --install ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "podman and runc are not installed; on Debian, as root: $0 --install" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && apt-get install -qy --no-install-recommends podman runc catatonit curl; } >&2
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
# Its containers' monitors leave files where it was started.
(cd "$state" && exec setsid podman system service --time=0 "unix://$socket") >"$state/log" 2>&1 </dev/null &
echo $! >"$state/pid"
for _ in $(seq 300); do
    if answers; then
        echo "unix://$socket"
        exit 0
    fi
    sleep 0.1
done
echo "podman's service did not answer; its log:" >&2
tail -5 "$state/log" >&2
"$0" --stop "$state"
exit 1
