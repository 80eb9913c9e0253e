# Owns the virtual environment of this checkout. Sourced by the other scripts, which set `root` first.

# Prints the first Python here that is new enough. $PYTHON goes first.
find_python() {
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then
            echo "$candidate"
            return
        fi
    done
    echo "asgi-router needs Python 3.11 or newer, and none is on PATH. Try PYTHON=/path/to/python3 $0" >&2
    return 1
}

# has_env NAME PIP_ARGS...: true when `ensure_env` with these arguments has nothing left to do.
has_env() {
    [ "$(cat "$root/.venv/installed-$1" 2>/dev/null)" = "$(env_stamp "$@")" ] && "$root/.venv/bin/python" -c '' 2>/dev/null
}

# What an installation depends on: where the checkout is, what it declares, what was asked for.
env_stamp() {
    echo "$root $(cat "$root/pyproject.toml" "$root/tests/requirements.txt" | cksum) $*"
}

# ensure_env NAME PIP_ARGS...: make .venv when it is missing, and `pip install PIP_ARGS` into it once.
# PIP_ARGS are read in the checkout's root. Says what it does, and shows pip's output only when pip fails.
# Returns non-zero in that case; every step is checked here, since `set -e` is off inside an `if`.
ensure_env() {
    if has_env "$@"; then
        return
    fi

    if ! "$root/.venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$(find_python) || return 1
        echo "Making .venv with $("$python" -V) ..." >&2
        if ! "$python" -m venv --clear "$root/.venv" >&2; then
            echo "$python can't make a virtual environment (on Debian: apt install python3-venv)." >&2
            return 1
        fi
    fi

    echo "Installing into .venv, which takes a minute the first time: $*" >&2
    stamp=$(env_stamp "$@")
    stamp_file=$root/.venv/installed-$1
    shift
    if ! (cd "$root" && .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@") >"$root/.venv/pip.log" 2>&1
    then
        tail -n 20 "$root/.venv/pip.log" >&2
        echo "pip could not install this. All of its output: $root/.venv/pip.log" >&2
        return 1
    fi
    echo "$stamp" >"$stamp_file"
}

# What tests, checks and mutants run in. Where llama.cpp does not install, simulated workers are tested.
ensure_test_env() {
    if ! has_env simulated-test -e . -r tests/requirements.txt && ! ensure_env test -e '.[demo]' -r tests/requirements.txt
    then
        echo "llama.cpp does not install here: trying without it, for simulated workers." >&2
        ensure_env simulated-test -e . -r tests/requirements.txt
    fi
}
