#!/bin/sh
# The README from nothing, with the jar that is given away, and the worker: examples.sh BUILD PYTHON CLASSPATH, by `make test`.
set -eu
build=$1 python=$2 classpath=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

first= # --first: of programs that follow
said() { # WORDS PROGRAM...
    words=$1
    shift
    answer=$("$python" ../cpp_client/tests/publish.py $first line "$@")
    echo "$answer"
    test "$answer" = "$words"
}

echo "== the README's example, without an installed library"
awk '/^```java$/ {on = 1; next} /^```$/ {on = 0} on' README.md >"$work/Main.java"
said "version 1: 4.50 at (1, 2, 3)" java -classpath "$classpath" "$work/Main.java"

echo "== the worker"
first=--first
said '{"worker":"w0","version":1,"prediction":4.5000,"digest":""}' sh -c 'exec "$0" "$1" --name w0' "$build/worker"
