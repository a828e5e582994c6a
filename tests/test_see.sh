#!/bin/sh
# gemma4-mini with its image tower: what it says of four pictures, in the default size and in the smallest. The pictures are those of
# tools/pictures.py --n 1 --size 64x64 with --kind one --seed 15, --kind one --seed 3, --kind number --seed 4, --kind word --seed 6.
# Environment: GEMMA4 (./gemma4).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

says() { # says TOKENS PICTURE QUESTION ANSWER: one case
    run models/gemma4-mini-q8_0.gguf --mmproj models/gemma4-mini-mmproj-f16.gguf --image "tests/data/$2.ppm" --image-tokens "$1" \
        -p "$3" --temp 0 -n 32
    ok "$1 tokens, $2: $3 got $(cat "$tmp/out")" [ "$(cat "$tmp/out")" = "$4" ]
}

says 280 blue_square "What color is the square?" "The square is blue."
says 280 red_triangle "What shape is it?" "It is a triangle."
says 70 blue_square "What shape is it?" "It is a square."
says 70 blue_square "What is in this picture?" "There is a blue square."
says 70 red_triangle "What color is it?" "The triangle is red."
says 70 orange_8 "What number is this?" "The number is 8."
says 70 red_dog "What word is this?" "The word is dog."
ok "the start says what the vocabulary lacks" \
    grep -qx '# note: the vocabulary has no <|image> and <image|>: pictures stand in the prompt without them' "$tmp/err"
finish test_see
