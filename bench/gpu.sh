#!/usr/bin/env bash
# The suite's GPU tests and the benchmark on one card, with what is installed there; nothing is fetched.
#
#   bash bench/gpu.sh [tests|bench|all] [arguments of bench/gpu_bench.py]
#
# The log of the tests, the times of decode steps, an answer for each model and trainer and RESULTS-gpu.md go to $OUT if
# that is set, else to bench/. Where a command's time is short, run the parts by commands of their own, here or on several machines:
#
#   bash bench/gpu.sh tests
#   bash bench/gpu.sh bench --models 0.6b --trainers groupgrad --timeout_s 540     and with trl, and with 4b
#   python bench/gpu_bench.py --merge FOLDER... --output bench     one report of all the answers; needs no card
#
# groupgrad is imported from this checkout. Packages that the machine lacks or has too old can lie as wheels in the
# folder $WHEELS (default .whl in the repository's root, which git ignores): they are unpacked into a temporary folder,
# without what they need, so name each one. What is missing or too old is said before anything runs. Beside torch 2.11,
# transformers 5.17, accelerate 1.15, huggingface-hub 1.33, tokenizers 0.23.2 and pyarrow 24 on Python 3.12, say, these do:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --dest .whl \
#       transformers==5.23.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 trl==1.16.0 \
#       hypothesis==6.170.15 sortedcontainers==2.4.0
#
# trl only if it is to be timed beside, the last two only for the tests. Not huggingface-hub: its releases from 2.0 on
# need packages that such an image lacks. Where pyarrow is 21 to 23, datasets==4.8.5 instead.
set -uo pipefail
cd "$(dirname "$0")/.."

what=${1:-all}
[ $# -gt 0 ] && shift
case $what in tests | bench | all) ;; *) echo "bench/gpu.sh: '$what' is none of tests, bench, all" >&2 && exit 2 ;; esac
output=${OUT:-bench}
python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
mkdir -p "$output"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if compgen -G "$wheels/*.whl" >/dev/null; then
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$unpacked" "$wheels"/*.whl ||
        exit 1
    export PYTHONPATH="$unpacked:$PYTHONPATH"
fi

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || echo "no nvidia-smi here"
"$python" bench/gpu_check.py || exit 1

status=0
if [ "$what" != bench ]; then
    if "$python" -c "import pytest" 2>/dev/null; then
        for package in hypothesis peft; do
            "$python" -c "import $package" 2>/dev/null || echo "$package is not installed here: tests whose file imports it do not run"
        done
        # Only files that have such tests, as others may need what is not here. In order, so that flex attention is
        # tried (tests/models) before a model comes that it refuses (tests/trainer), after which it is left alone.
        mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='*.py' | sort)
        "$python" -m pytest -m gpu -rs --continue-on-collection-errors "${files[@]}" 2>&1 | tee "$output/gpu-tests.log"
        status=$?
    else
        echo "pytest is not installed here: no tests"
        status=1
    fi
fi
if [ "$what" != tests ]; then
    "$python" bench/gpu_decode.py 2>&1 | tee "$output/gpu-decode.log" || status=1
    "$python" bench/gpu_bench.py --output "$output" "$@" || status=1
fi
exit $status
