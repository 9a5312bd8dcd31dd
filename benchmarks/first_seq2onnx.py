"""Translate one text with a bundle, then wait until standard input ends: BUNDLE THREADS TEXT."""

import sys

import msgspec

from runtime import Translator

translator = Translator.open(sys.argv[1], threads=int(sys.argv[2]))
config = msgspec.structs.replace(translator.defaults, num_beams=1, max_new_tokens=64)
sys.stdout.write(translator.translate([sys.argv[3]], config)[0].text + "\n")
sys.stdout.flush()
sys.stdin.read()
