#!/bin/sh
# Copies a backend under a new name, as the start of a port (docs/porting.md).
#
#   tools/new_backend.sh NAME          writes parts/NAME.h, a copy of the reference in C
#   tools/new_backend.sh NAME.cu       writes parts/NAME.cu, a copy of the reference in C++ for nvcc
#   tools/new_backend.sh NAME.cu plain     writes parts/NAME.cu, a copy of parts/plain.cu
#
# In the copy every name that begins with ref, Ref or REF (plain) begins with NAME, Name or NAME, and the table is
# NAME_ops().
cd "$(dirname "$0")/.." || exit 1
name=${1%.h}
extension=h
case $name in *.cu) name=${name%.cu} extension=cu ;; esac
case $name in
'' | *[!a-z0-9_]* | [!a-z]*)
    echo "new_backend.sh: expected a name of a-z, 0-9 and _, got '$1'; try tools/new_backend.sh toy" >&2
    exit 1 ;;
auto | bool | break | case | char | const | continue | default | do | double | else | enum | extern | float | for | goto | if | \
    inline | int | long | main | register | restrict | return | short | signed | sizeof | static | struct | switch | typedef | \
    union | unsigned | void | volatile | while | class | delete | new | private | public | template | this | throw | try)
    echo "new_backend.sh: '$name' is a word of C or C++; choose another name" >&2
    exit 1 ;;
esac
case ${2:-reference}.$extension in
reference.* | plain.cu) ;;
*)
    echo "new_backend.sh: expected NAME, NAME.cu, or NAME.cu plain, got '$*'" >&2
    exit 1 ;;
esac
file=parts/$name.$extension
if [ -e "parts/$name.h" ] || [ -e "parts/$name.cu" ] || [ -e "parts/$name.cuh" ] || [ "$name" = cuda ]; then
    echo "new_backend.sh: $name: there is a part of this name; choose another" >&2
    exit 1
fi
if [ "${2:-}" = plain ]; then
    sed -e "s/\bplain_/${name}_/g; s/\bplain\([.;]\)/$name\1/g; s/\"plain\"/\"$name\"/g; s/error: plain:/error: $name:/g" \
        -e "1s|.*|/* $name.cu - the backend \"$name\", a copy of parts/plain.cu: the definition of parts/reference.h in|" \
        parts/plain.cu >"$file"
    echo "$file: now: make BACKEND=$file test-backend"
    exit 0
fi
upper=$(echo "$name" | tr a-z A-Z)
first=$(echo "$name" | cut -c 1 | tr a-z A-Z)$(echo "$name" | cut -c 2-)
{
    echo "/* $name.$extension - the backend \"$name\": every operation of gemma4.h, as in parts/reference.h, and ${name}_ops()."
    echo " *"
    echo " * Replace one operation, run the tests, continue with the next (docs/porting.md)."
    echo " *"
    echo " * Uses gemma4.h, gguf.h, kv.h and the math library. Begin with ${name}_ops()."
    echo " *"
    sed -n '1,/\*\//s/^ \*  *\[/&/p' parts/reference.h
    [ $extension = h ] && sed -n '/^#ifndef REFERENCE_H/,/^#define REFERENCE_H/p' parts/reference.h
    [ $extension = h ] || printf '#include "gemma4.h"\n#include "gguf.h"\n#include "parts/kv.h"\n'
    sed -n '/^#define REFERENCE_H/,$p' parts/reference.h | sed 1d | if [ $extension = h ]; then cat; else sed '$d'; fi
} | sed -e "/^\/\* $name/b" -e "s/\bref_/${name}_/g; s/\bref\([.;]\)/${name}\1/g" \
    -e "s/\bRef\([A-Z]\)/$first\1/g; s/\bREF_/${upper}_/g; s/\bREFERENCE_H\b/${upper}_H/g" \
    -e "s/\breference_ops/${name}_ops/g; s/\"reference\"/\"$name\"/g; s/error: reference:/error: $name:/g" >"$file"
left=$(sed 1d "$file" | grep -nEi '\bref_|\breference|\bref\b')
if [ "$left" ]; then
    echo "new_backend.sh: $file: names of the reference are left: $left" >&2
    exit 1
fi
echo "$file: now: make BACKEND=$file test-backend"
