#!/bin/sh
# Tests the header, the library and its packages: run.sh BUILD PYTHON. `make test` calls it.
set -eu
build=$1 python=$2
strict="-std=c11 -Wall -Wextra -Wpedantic -Werror -O1 -g -Iinclude"
private="-lzmq -lcrypto -lsodium -lpthread -ldl -lm"
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT

say() { echo "== $*"; }
have() { # in CI everything must be there
    command -v "$1" >/dev/null || { [ -z "${CI:-}" ] || exit 1; echo "$1 is not installed: left out"; return 1; }
}

say "nothing is exported but what the header says"
nm -D --defined-only "$build/libweightbus.so.1" | awk '{print $3}' | sort >"$prefix/exported"
sed -n 's/^[^ /].*[ *]\(wb_[a-z_]*\)(.*/\1/p' include/weightbus.h | sort >"$prefix/promised"
diff "$prefix/promised" "$prefix/exported"
objdump -p "$build/libweightbus.so.1" | grep -q "SONAME *libweightbus.so.1$"

say "the header is what cbindgen makes of the source, and C++ takes it, too"
! have cbindgen || cbindgen --quiet --config cbindgen.toml src/lib.rs | diff include/weightbus.h -
${CXX:-c++} -Wall -Wextra -Werror -fsyntax-only -x c++ include/weightbus.h

say "the shared library, over shared memory and over the network"
${CC:-cc} $strict -o "$build/test" tests/test.c -L"$build" -Wl,-rpath,'$ORIGIN' -lweightbus -lpthread
"$python" tests/serve.py "$build/test"
"$python" tests/serve.py "$build/test" network

say "the static library, under AddressSanitizer"
${CC:-cc} $strict -fsanitize=address,undefined -o "$build/test-asan" tests/test.c "$build/libweightbus.a" $private
"$python" tests/serve.py "$build/test-asan"
"$python" tests/serve.py "$build/test-asan" network

if have valgrind; then
    say "valgrind: memcheck and helgrind"
    "$python" tests/serve.py valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite "$build/test"
    "$python" tests/serve.py valgrind -q --tool=helgrind --error-exitcode=9 --suppressions=tests/helgrind.supp "$build/test"
fi

say "installed: pkg-config and CMake"
make -s install PREFIX="$prefix" BUILD="$build" >/dev/null
if have pkg-config; then
    flags=$(PKG_CONFIG_PATH="$prefix/lib/pkgconfig" pkg-config --cflags --libs weightbus)
    ${CC:-cc} -o "$prefix/worker" examples/worker.c $flags
    LD_LIBRARY_PATH="$prefix/lib" "$prefix/worker" ipc:///nowhere 0
fi
if have cmake; then
    printf '%s\n' 'cmake_minimum_required(VERSION 3.18)' 'project(user C)' 'find_package(libweightbus REQUIRED)' \
        'foreach(kind c c_static)' '  add_executable(worker_${kind} worker.c)' \
        '  target_link_libraries(worker_${kind} PRIVATE weightbus::${kind})' 'endforeach()' >"$prefix/CMakeLists.txt"
    cp examples/worker.c "$prefix/"
    cmake -S "$prefix" -B "$prefix/made" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
    cmake --build "$prefix/made" >/dev/null
    "$prefix/made/worker_c" ipc:///nowhere 0
    "$prefix/made/worker_c_static" ipc:///nowhere 0
fi

follows() { # COMMAND...: a worker
    said=$("$python" ../cpp_client/tests/publish.py --first line "$@")
    echo "$said"
    test "$said" = "version 1: 2 -1 0.5, 3"
}
if have luajit; then
    say "the example in Lua"
    WEIGHTBUS_H=include/weightbus.h WEIGHTBUS_SO="$build/libweightbus.so.1" follows luajit ../examples/lua/worker.lua
fi
if have mcs && have mono; then
    say "the example in C#"
    mcs -warnaserror -out:"$prefix/worker.exe" ../examples/csharp/Worker.cs
    LD_LIBRARY_PATH="$build" follows mono "$prefix/worker.exe"
fi
