#!/usr/bin/env bash
# The suite's GPU tests and the benchmark on one card, with what is installed there; nothing is fetched.
#
#   bash bench/gpu.sh [tests|bench|all] [arguments of bench/gpu_bench.py]
#
# groupgrad is imported from this checkout. Packages that the machine lacks or has too old can lie as wheels in the
# folder $WHEELS (default .whl in the repository's root, which git should ignore): they are unpacked into a temporary
# folder, without what they need, so name each one. groupgrad needs transformers >= 5.19 and datasets; where neither
# is installed, carry transformers, huggingface_hub, datasets, dill and multiprocess; with trl too, TRL is timed beside.
# RESULTS-gpu.md and the test log go to $OUT if that is set, else to bench/.
set -uo pipefail
cd "$(dirname "$0")/.."

what=${1:-all}
[ $# -gt 0 ] && shift
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
"$python" - <<'PYTHON' || exit 1
import importlib.util
import sys

missing = [name for name in ("torch", "transformers", "accelerate", "datasets") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing here: {', '.join(missing)}; carry wheels, see the head of bench/gpu.sh")
import torch
import transformers

print(f"torch {torch.__version__}, transformers {transformers.__version__}, CUDA: {torch.cuda.is_available()}")
PYTHON

status=0
if [ "$what" != bench ]; then
    if "$python" -c "import pytest" 2>/dev/null; then
        # --timeout belongs to a plugin that may be missing; unknown ini options only warn.
        "$python" -m pytest -m gpu -rs tests 2>&1 | tee "$output/gpu-tests.log"
        status=$?
        [ $status -eq 5 ] && echo "no test is marked gpu" && status=0
    else
        echo "pytest is not installed here: no tests"
    fi
fi
if [ "$what" != tests ]; then
    "$python" bench/gpu_bench.py --output "$output" "$@" || status=1
fi
exit $status
