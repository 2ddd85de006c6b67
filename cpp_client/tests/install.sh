#!/bin/sh
# Installs the library, then builds the README's example with find_package, and runs it.
#
#     install.sh SOURCE BUILD
set -eu
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" > "$work/log"
mkdir "$work/example"
awk '/^```cpp$/ {on = 1; next} /^```$/ {on = 0} on' "$source/README.md" > "$work/example/main.cpp"
cat > "$work/example/CMakeLists.txt" << 'END'
cmake_minimum_required(VERSION 3.18)
project(example LANGUAGES CXX)
find_package(weightbus REQUIRED)
add_executable(example main.cpp)
target_link_libraries(example PRIVATE weightbus::weightbus)
END
cmake -S "$work/example" -B "$work/example/build" -DCMAKE_PREFIX_PATH="$work/prefix" >> "$work/log"
cmake --build "$work/example/build" >> "$work/log"

mkfifo "$work/address"
"$build/serve_line" > "$work/address" &
publisher=$!
read -r address < "$work/address"
said=$(timeout 60 "$work/example/build/example" "$address")
wait "$publisher"
echo "$said"
test "$said" = "version 1: 4.50 at (1, 2, 3)"
