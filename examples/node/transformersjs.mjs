// Translate the lines of standard input with transformers.js, from a bundle of --layout transformersjs, off line.
//   node transformersjs.mjs BUNDLE < sentences.txt
import { readFileSync } from "node:fs";
import { basename, dirname, resolve } from "node:path";
import { env, pipeline } from "@huggingface/transformers";

const folder = resolve(process.argv[2]);
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
const { max_length } = JSON.parse(readFileSync(`${folder}/generation_config.json`, "utf8"));
const translator = await pipeline("translation", basename(folder));
for (const line of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  // Its own limit counts tokens after the start token. It has no beam search: num_beams is ignored.
  const [{ translation_text }] = await translator(line, { max_new_tokens: max_length - 1 });
  console.log(translation_text);
}
