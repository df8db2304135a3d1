#!/usr/bin/env bash
# The C++ with ThreadSanitizer: the tests of native/, and those in which several threads use one store, mirror or
# sender. The interpreter itself is not built with it; its lock is seen all the same. What is reported of the C library
# and not of native/ is named in races.supp. Takes some minutes; whatever it finds is shown, and the exit code is not 0.
#   tests/native/races.sh
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/races
cmake -S . -B "$folder/cmake" -G Ninja -DEVERSTEP_SANITIZE=thread -DPython_EXECUTABLE="$(command -v python)"
cmake --build "$folder/cmake" ${JOBS:+-j "$JOBS"}
rm -rf "$folder/src" "$folder"/found*
cp -r src "$folder/src"
cp "$folder"/cmake/_native*.so "$folder/src/everstep/native/"
export PYTHONPATH=$folder/src
export TSAN_OPTIONS="halt_on_error=0 history_size=4 log_path=$folder/found suppressions=$PWD/tests/native/races.supp"
status=0
# Its memory lies where address space randomisation must not put anything: setarch -R.
setarch "$(uname -m)" -R env LD_PRELOAD="$(gcc -print-file-name=libtsan.so)" \
  python -m pytest -q -p no:cacheprovider tests/native tests/protect/test_replication_sender.py || status=$?
if grep -qs "^SUMMARY: ThreadSanitizer" "$folder"/found*; then
  cat "$folder"/found*
  status=1
fi
exit $status
