#!/usr/bin/env bash
# What groupgrad does on one card, in two commands of a quarter of an hour together, with what is installed there.
#
#   bash bench/gpu.sh first      nine minutes: checks of the fast path, kernels, decode steps, whole steps, TRL beside them
#   bash bench/gpu.sh second     three minutes: the GPU tests of the suite
#   bash bench/gpu.sh STAGE...   some stages (see bench/gpu_bench.py): check smoke kernels decode steps trl beside-trl 8b tests
#
# Each stage ends by its own limit, and RESULTS-gpu.md, gpu.json and gpu.log are whole after each; they go to $OUT if that
# is set, else to bench/. The status is the number of failures. `--tiny` rehearses everything on a CPU.
#
# groupgrad is imported from this checkout. Packages that the machine lacks or has too old can lie as wheels in the
# folder $WHEELS (default .whl in the repository's root, which git ignores): they are unpacked into a temporary folder,
# without what they need, so name each one. What is missing or too old is said before anything runs. Beside torch 2.11,
# triton 3.6, transformers 5.17, accelerate 1.15, huggingface-hub 1.33 and pyarrow 24 on Python 3.12, these do:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --dest .whl datasets==5.2.0 dill==0.4.1 \
#       multiprocess==0.70.19 loky==3.7.0 shtab==1.8.0 trl==1.16.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
#
# trl and what follows it only to be timed beside. Where pyarrow is 21 to 23, datasets==4.8.5 instead.
set -uo pipefail
cd "$(dirname "$0")/.."

output=${OUT:-bench}
python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if compgen -G "$wheels/*.whl" >/dev/null; then
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$unpacked" "$wheels"/*.whl ||
        exit 1
    export PYTHONPATH="$unpacked:$PYTHONPATH"
fi

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || echo "no nvidia-smi here"
"$python" bench/gpu_bench.py --output "$output" "$@"
