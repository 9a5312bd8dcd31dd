// Greedy search over the three graphs of a bundle with onnxruntime-node: ids in, ids out, one JSON list a line.
//   node translate.mjs BUNDLE < source-ids.jsonl > target-ids.jsonl
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { InferenceSession, Tensor } from "onnxruntime-node";

const folder = process.argv[2];
const json = (name) => JSON.parse(readFileSync(join(folder, name), "utf8"));
const { roles } = json("bundle.json");
const { decoder_start_token_id: start, eos_token_id: eos, max_length: longest } = json("generation_config.json");
// Opened by path, ONNX Runtime finds weights.bin beside the graph and maps it.
const open = (verb) => InferenceSession.create(join(folder, roles[verb]));
const [encode, prefill, step] = await Promise.all([open("encode"), open("prefill"), open("step")]);

const int64 = (ids) => new Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);

// Most probable token at the last position of logits (1, T, V).
function best({ data, dims: [, length, size] }) {
  const row = data.subarray((length - 1) * size);
  return row.reduce((found, value, token) => (value > row[found] ? token : found), 0);
}

// What came out as "present" goes in as "past_key_values" at the next step. Step computes no cross-attention
// caches (".encoder."): those of prefill stay.
function keep(past, outputs) {
  for (const [name, tensor] of Object.entries(outputs)) {
    if (name.startsWith("present.")) past[name.replace("present.", "past_key_values.")] = tensor;
  }
}

async function translate(sourceIds) {
  const mask = int64(sourceIds.map(() => 1));
  const { last_hidden_state: memory } = await encode.run({ input_ids: int64(sourceIds), attention_mask: mask });
  const ids = [], past = {};
  let outputs = await prefill.run({
    encoder_attention_mask: mask,
    input_ids: int64([start]),
    encoder_hidden_states: memory,
  });
  for (;;) {
    ids.push(best(outputs.logits));
    // The start token counts, too.
    if (ids.at(-1) === eos || ids.length + 1 >= longest) return ids;
    keep(past, outputs);
    outputs = await step.run({ encoder_attention_mask: mask, input_ids: int64(ids.slice(-1)), ...past });
  }
}

for (const line of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  console.log(JSON.stringify(await translate(JSON.parse(line))));
}
