"""Translate one text with CTranslate2, then wait until standard input ends: MODEL PIECES THREADS TEXT."""

import sys

import ctranslate2
import sentencepiece

translator = ctranslate2.Translator(sys.argv[1], device="cpu", inter_threads=1, intra_threads=int(sys.argv[3]))
source = sentencepiece.SentencePieceProcessor(model_file=f"{sys.argv[2]}/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file=f"{sys.argv[2]}/target.spm")
pieces = [*source.encode(sys.argv[4], out_type=str), "</s>"]
(result,) = translator.translate_batch([pieces], beam_size=1, max_decoding_length=64)
sys.stdout.write(target.decode(result.hypotheses[0]) + "\n")
sys.stdout.flush()
sys.stdin.read()
