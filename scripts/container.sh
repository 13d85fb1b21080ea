# Sourced by the scripts docker-*: `find_engine` sets $engine, `split_kind "$@"` sets $kind and $rest. Settings:
# $CONTAINER_ENGINE names docker, podman or buildah; $CONTAINER_BUILD_OPTIONS and $CONTAINER_RUN_OPTIONS hold words for
# every build and every run; $IMAGE replaces the name ampcompare:cpu or ampcompare:gpu.

here=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read -ra build_options <<<"${CONTAINER_BUILD_OPTIONS:-}"
read -ra run_options <<<"${CONTAINER_RUN_OPTIONS:-}"

# The client of docker may be there without its daemon.
works() { command -v "$1" >/dev/null && { [ "$1" != docker ] || docker info >/dev/null 2>&1; }; }

find_engine() {
    for engine in ${CONTAINER_ENGINE:-docker podman buildah}; do
        if works "$engine"; then return; fi
    done
    local wanted=${CONTAINER_ENGINE:-docker, podman or buildah}
    case $wanted in
        docker*)
            if command -v docker >/dev/null; then
                die "the daemon of docker does not answer: start it, or install podman or buildah"
            fi
            ;;
    esac
    die "no $wanted here: install one, or use scripts/demo, which needs none"
}

split_kind() {
    kind=cpu
    if nvidia-smi -L >/dev/null 2>&1; then kind=gpu; fi
    case ${1:-} in cpu | gpu) kind=$1; shift ;; esac
    rest=("$@")
    image=${IMAGE:-ampcompare:$kind}
}
