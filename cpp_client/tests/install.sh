#!/bin/sh
# Follows the README in an empty folder, with every way to link: install.sh BUILD PYTHON. `make test` calls it.
# CMAKE names another CMake, such as 3.18.
set -eu
build=$1 python=$2 source=$(pwd) cmake=${CMAKE:-cmake}
work=$(mktemp -d)
worker=
trap '[ -z "$worker" ] || kill "$worker"; rm -rf "$work"' EXIT

say() { echo "== $*"; }
said() { # MODEL WORDS PROGRAM
    model=$1 words=$2
    shift 2
    answer=$("$python" tests/publish.py "$model" "$@")
    echo "$answer"
    test "$answer" = "$words"
}
cmake_lists() { # HOW TARGET...
    printf '%s\n' 'cmake_minimum_required(VERSION 3.18)' 'project(example LANGUAGES CXX)' "$1"
    shift
    for target in "$@"; do
        printf '%s\n' "add_executable(with_$target main.cpp)" \
            "target_link_libraries(with_$target PRIVATE weightbus::$target)"
    done
}

say "installed, and found: its library linked in, and asked for at run time"
"$cmake" --install "$build" --prefix "$work/prefix" >"$work/log"
mkdir "$work/example"
awk '/^```cpp$/ {on = 1; next} /^```$/ {on = 0} on' README.md >"$work/example/main.cpp"
cmake_lists 'find_package(weightbus REQUIRED)' weightbus shared >"$work/example/CMakeLists.txt"
"$cmake" -S "$work/example" -B "$work/example/build" -DCMAKE_PREFIX_PATH="$work/prefix" >>"$work/log"
"$cmake" --build "$work/example/build" >>"$work/log"
for target in weightbus shared; do
    said line "version 1: 4.50 at (1, 2, 3)" "$work/example/build/with_$target"
done
ldd "$work/example/build/with_shared" | grep -q libweightbus
test -z "$(ldd "$work/example/build/with_weightbus" | grep libweightbus)"

say "as a part of another project"
cmake_lists "add_subdirectory($source weightbus)" weightbus >"$work/example/CMakeLists.txt"
"$cmake" -S "$work/example" -B "$work/part" >>"$work/log"
"$cmake" --build "$work/part" >>"$work/log"

say "over a libweightbus that is installed"
"$cmake" -S . -B "$work/over" -DWEIGHTBUS_INSTALLED=ON -DWEIGHTBUS_BUILD=OFF -DCMAKE_PREFIX_PATH="$work/prefix" >>"$work/log"

say "Eigen"
[ ! -x "$build/policy" ] || said policy "version 1: 3.8008 4.06966" "$build/policy"

say "a trainer, and a worker that takes the line from it"
mkfifo "$work/taken"
exec 3<>"$work/taken"
"$build/worker" "ipc://$work/line" --patience 60 >&3 &
worker=$!
"$build/trainer" "ipc://$work/line" --steps 5
timeout 60 grep -m 1 '"version":5,' <&3 # once it has printed it
kill "$worker"
wait "$worker" # 0: it has said goodbye
worker=
