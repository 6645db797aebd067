# shellcheck shell=bash
# What the launchers share: checks that all come before anything starts, and commands that can be shown instead of run.

ARGUMENTS="[--dry-run]"
DRY_RUN=0
PROBLEMS=()

parse_arguments() {
  for argument in "$@"; do
    case "$argument" in
      --dry-run) DRY_RUN=1 ;;
      *) usage ;;
    esac
  done
}

usage() {
  echo "usage: $0 $ARGUMENTS" >&2
  exit 2
}

# need_variable NAME WHAT: a variable that must be set. Its value is never printed: it may be a secret.
need_variable() {
  [[ -n "${!1:-}" ]] || PROBLEMS+=("set $1: $2")
}

# need_path NAME WHAT: a variable that names a file or directory that exists on this node.
need_path() {
  need_variable "$1" "$2"
  [[ -z "${!1:-}" || -e "${!1}" ]] || PROBLEMS+=("$1 is ${!1}, which does not exist: $2")
}

need_command() {
  command -v "$1" >/dev/null || PROBLEMS+=("$1 is not installed: $2")
}

# check_all: every problem at once. A dry run shows them and goes on, so that the commands can be read anywhere.
check_all() {
  [[ ${#PROBLEMS[@]} -gt 0 ]] || return 0
  printf 'problem: %s\n' "${PROBLEMS[@]}" >&2
  if [[ $DRY_RUN == 0 ]]; then
    echo "nothing was started" >&2
    exit 1
  fi
}

# run COMMAND…: run it, or show it, an option a line, in a form that a shell reads.
run() {
  if [[ $DRY_RUN == 0 ]]; then
    "$@"
    return
  fi
  local word
  for word in "$@"; do
    if [[ "$word" == --?* ]]; then
      printf '\\\n  '
    fi
    printf '%q ' "$word"
  done
  printf '\n'
}
