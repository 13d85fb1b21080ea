# Sourced by the other scripts: `prepare EXTRAS` makes .venv ready once, and costs next to nothing afterwards.
# It needs Python and a package registry only. $PYTHON names the interpreter; without it a suitable one is looked for.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
venv=.venv
log=$venv/install.log
busy=$venv/.installing
cpu_index=https://download.pytorch.org/whl/cpu

# An activated .venv must not be created from itself.
PATH=${PATH//"$root/$venv/bin:"/}

# Settings of a user's pip that cannot work in a virtual environment, or that would wait for an answer.
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'scripts/%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$@"; exit 4; }

# Prints 3.11 or the like, and nothing where $1 cannot be run.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# What decides the content of an environment.
recipe() { cat setup.py constraints/*.txt scripts/environment.sh | cksum; }

# Is .venv whole, made in this folder, and of the interpreter that was asked for?
usable() {
    local version
    [ ! -e $busy ] && grep -qF "$root/$venv" $venv/bin/activate 2>/dev/null || return 1
    version=$(version_of $venv/bin/python)
    [ -n "$version" ] && [ "$version" = "$(version_of "${PYTHON:-$venv/bin/python}")" ]
}

ready() {
    local extra
    usable || return 1
    for extra in ${1//,/ }; do
        [ "$(cat "$venv/.ready-$extra" 2>/dev/null)" = "$(recipe)" ] || return 1
    done
}

# Sets $python to the first interpreter that torch has wheels for and that can make environments.
choose_python() {
    local version old='' bare=''
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11 python3.14; fi
    for python; do
        version=$(version_of "$python")
        case $version in
            3.1[1-4]) "$python" -c 'import venv, ensurepip' 2>/dev/null && return; bare="${bare:-$python}" ;;
            ?*) old="${old:-$python is $version}" ;;
        esac
    done
    [ -z "$bare" ] || die "$bare lacks venv and ensurepip: install them (Debian: apt install python3-venv)," \
        "or name another interpreter with PYTHON=/path/to/python"
    die "Python 3.11 to 3.14 is needed, and ${old:-$1 cannot be run}: install one, or name it with PYTHON=/path/to/python"
}

# Does the interpreter bring a torch that works on the GPU, as images for GPUs do? Prints the folder of its packages if
# it is a virtual environment, whose packages another one does not see by itself.
brings_torch() {
    "$1" - 2>/dev/null <<'EOF'
import sys, sysconfig
import torch, torchvision
new = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)
if not (new and torch.cuda.is_available()):
    sys.exit(1)
if sys.prefix != sys.base_prefix:
    print(sysconfig.get_path("purelib"))
EOF
}

# Two tries a URL are enough to tell that there is no network.
pip_install() { $venv/bin/python -m pip install --retries 1 "$@" >>$log 2>&1 </dev/null; }

unreachable() {
    grep -qE 'ConnectionError|ConnectTimeout|ReadTimeout|connection broken|ProxyError|SSLError|Could not fetch URL' $log
}

# Ends with one line: what is given, and what pip said last.
fail() {
    if grep -q 'No space left on device' $log; then die "the disk is full: free some space (log: $log)"; fi
    # Then pip stopped before it wrote anything, and what is there is whole; after other failures that is not certain.
    if tail -n 1 $log | grep -q 'No matching distribution'; then rm -f $busy; fi
    die "$* (log: $log): $(sed -n '/ResolutionImpossible/d; s/^ERROR: //p' $log | tail -n 1)"
}

explain() {
    if unreachable; then
        fail "the package registry cannot be reached: check the network, or the index and proxy that pip is set to use"
    fi
    fail "$1"
}

install_torch_without_cuda() {
    local pin wanted
    pin=$(grep -o '^torch==[^;]*+cpu' constraints/cpu.txt)
    wanted="CPU wheel of ${pin/==/ } for Python $(version_of $venv/bin/python) on $(uname -m)"
    pip_install --no-deps "$pin" && return
    if unreachable || ! grep -q 'No matching distribution' $log; then explain "the $wanted could not be installed"; fi
    pip_install --timeout 15 --index-url $cpu_index --no-deps "$pin" ||
        fail "there is no $wanted in the sources that pip is set to use, nor could it be had from $cpu_index;" \
            "another interpreter can be named with PYTHON=/path/to/python"
}

# That of PyPI is built for CUDA: next to a torch without CUDA its operators do not load, and only ampcompare can import it.
install_torchvision_without_cuda() {
    local pin
    pin=$(grep -o '^torchvision==[^;]*' constraints/cpu.txt)+cpu
    log=/dev/null pip_install --no-deps "$pin" ||
        log=/dev/null pip_install --timeout 15 --index-url $cpu_index --no-deps "$pin" || true
}

install() {
    local extra free_gb kind=cpu lent='' need_gb=2 owner site
    owner=$(cat $busy 2>/dev/null || true)
    if [ -n "$owner" ] && [ "$owner" != $$ ] && kill -0 "$owner" 2>/dev/null; then
        die "process $owner is installing into $venv: wait for it (if that is something else, remove $busy)"
    fi
    python=$venv/bin/python
    if nvidia-smi -L >/dev/null 2>&1; then kind=cuda need_gb=8; fi
    if ! usable; then
        choose_python
        if [ $kind = cuda ] && lent=$(brings_torch "$python"); then kind=system need_gb=1; fi
        rm -rf $venv
        free_gb=$(($(df -Pk . | awk 'END { print $4 }') / 1024 / 1024))
        [ "$free_gb" -ge $need_gb ] || die "$root has $free_gb GB free, and $need_gb GB are needed: free some space"
        mkdir $venv
        echo $$ >$busy
        "$python" -m venv $([ $kind != system ] || echo --system-site-packages) $venv >$log 2>&1 ||
            explain "$python -m venv failed"
        if [ -n "$lent" ]; then
            for site in $venv/lib/python*/site-packages; do echo "$lent" >"$site/lent.pth"; done
        fi
    elif grep -q 'include-system-site-packages = true' $venv/pyvenv.cfg; then
        kind=system
    fi
    echo $$ >$busy
    # pip ends in good order when interrupted, half done; without the trap that would pass for a failure.
    trap 'say "interrupted: the next call starts from scratch"; exit 130' INT TERM
    say "installing into $venv, some minutes (log: $log)"
    if [ $kind = cpu ] && [ "$(uname -s)" = Linux ]; then
        install_torch_without_cuda
        install_torchvision_without_cuda
    fi
    pip_install $([ $kind = system ] || echo -c "constraints/$kind.txt") -e ".[$1]" ||
        explain "the packages could not be installed"
    for extra in ${1//,/ }; do recipe >"$venv/.ready-$extra"; done
    rm -f $busy
    trap - INT TERM
}

prepare() {
    ready "$1" || install "$1"
    export PATH="$root/$venv/bin:$PATH"
}
