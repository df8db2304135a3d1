#!/usr/bin/env bash
# The C++ with AddressSanitizer and UndefinedBehaviorSanitizer: crafted snapshots and differences, then the tests of
# native/ and all parsers of native/ under tests/fuzz. Takes some minutes to build; whatever it finds ends it.
#   tests/native/sanitized.sh [SEED [COUNT]]
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/sanitized
cmake -S . -B "$folder/cmake" -G Ninja -DEVERSTEP_SANITIZE=address -DPython_EXECUTABLE="$(command -v python)"
cmake --build "$folder/cmake" ${JOBS:+-j "$JOBS"}
rm -rf "$folder/src"
cp -r src "$folder/src"
cp "$folder"/cmake/_native*.so "$folder/src/everstep/native/"
export PYTHONPATH=$folder/src
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
python tests/native/crafted.py "${1:-1}" "${2:-2000}" 2>"$folder/said" || { tail -60 "$folder/said"; exit 1; }
python tests/fuzz/fuzz.py --native --seed "${1:-1}" --seconds 30
python -m pytest -q -p no:cacheprovider tests/native
