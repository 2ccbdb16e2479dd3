// Two conversations, a rollback, a fork, a freeze and an unfreeze, with onnxruntime-node.
//
//   node conversations.mjs MODEL.onnx LIBKVFUSE_OPS
//
// Beside its normal inputs the model is fed kv_sequence and kv_past_length, and nothing else: no cache goes in or out.
// make_model.py tells what a model for this binding needs, kvfuse.c how the library is registered.
import assert from 'node:assert/strict';
import { readdirSync } from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';
import process from 'node:process';

const require = createRequire(import.meta.url);
const ort = require('onnxruntime-node');
const kvfuse = require(process.env.KVFUSE_ADDON ?? './build/kvfuse.node');

const [model, library] = process.argv.slice(2);
const binaries = path.join(
  path.dirname(require.resolve('onnxruntime-node/package.json')), 'bin', 'napi-v6', process.platform, process.arch);
const runtime = readdirSync(binaries).find((name) => /^libonnxruntime\.(so|.*dylib)/.test(name));
kvfuse.register(path.join(binaries, runtime), library);

const session = await ort.InferenceSession.create(model, { logSeverityLevel: 4 }); // errors are checked below
assert(session.inputNames.includes('kv_sequence'), 'expected kv_sequence without a default; see make_model.py');
const integers = (values, shape) => new ort.Tensor('int64', BigInt64Array.from(values, BigInt), shape);

// Runs tokens after `past` ones; what the conversation holds beyond them is forgotten. Handle 0 is the session's own
// conversation. Gives the logits of the last token.
async function run(tokens, past, handle = 0) {
  const total = past + tokens.length;
  const feeds = {
    input_ids: integers(tokens, [1, tokens.length]),
    attention_mask: integers(Array(total).fill(1), [1, total]),
    position_ids: integers(tokens.map((_, i) => past + i), [1, tokens.length]),
    kv_sequence: integers([handle], [1]),
    kv_past_length: integers([past], [1]),
  };
  const { logits } = await session.run(feeds, ['logits']);
  return logits.data.slice(-logits.dims[2]);
}

const argmax = (logits) => logits.reduce((best, x, i) => (x > logits[best] ? i : best), 0);

function expect(condition, what) {
  assert(condition, what);
  console.log(`ok: ${what}`);
}

const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

// Two conversations beside the session's own one.
const first = kvfuse.create();
const second = kvfuse.create();
const own = await run([7, 3, 44], 0);
expect(same(await run([7, 3, 44], 0, first), own), 'a conversation says what another with its tokens says');
await run([60, 21, 5, 9], 0, second);
expect(kvfuse.length(first) === 3 && kvfuse.length(second) === 4, 'two conversations have their own lengths');

// Greedy text, then back to the prompt and again: the same text.
async function generate(handle, next, past, count) {
  const text = [];
  for (let i = 0; i < count; ++i) {
    text.push(next);
    next = argmax(await run([next], past + i, handle));
  }
  return text;
}
const text = await generate(first, argmax(own), 3, 6);
console.log(`first: ${text.join(' ')}`);
expect(same(await generate(first, argmax(own), 3, 6), text), 'rolled back, a conversation says the same again');

// A fork shares what was said, and goes another way.
const forked = kvfuse.fork(first);
await run([1, 2], 9, forked);
expect(kvfuse.length(first) === 9 && kvfuse.length(forked) === 11, 'a fork leaves its source alone');

// Frozen bytes can be stored; the conversation goes on where it stood.
const frozen = kvfuse.freeze(second);
const expected = await run([33], 4, second);
kvfuse.destroy(second);
const thawed = kvfuse.unfreeze(frozen);
expect(same(await run([33], 4, thawed), expected), 'unfrozen, a conversation goes on where it stood');

// Errors are sentences.
await assert.rejects(run([1], 99, first), /expected a kv_past_length from -1 to the present length 9; found 99/);
await assert.rejects(run([1], 0, second), new RegExp(`expected the handle of a live sequence; found ${second}`));
assert.throws(() => kvfuse.unfreeze(frozen.subarray(1)), /\[state\] expected/);
expect(same(await run([33], 4, thawed), expected), 'a refused call changes nothing');

for (const handle of [first, forked, thawed]) kvfuse.destroy(handle);
await session.release();
