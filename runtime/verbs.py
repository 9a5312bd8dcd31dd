"""Calling a verb with the contract's names instead of positions: how an exam speaks to a backend."""

from collections.abc import Mapping

from .backend import Array, Backend, Cache, LayerCache, Tensor
from .contract import BEGIN, BRANCH, ENCODE, PREFILL, STEP, VERBS


def call(backend: Backend[Tensor], verb: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs of `verb` by name, for `inputs` by name (see `runtime.contract`)."""
    if verb == ENCODE:
        memory = backend.encode(backend.put(inputs["input_ids"]), backend.put(inputs["attention_mask"]))
        return {"last_hidden_state": backend.get(memory)}
    if verb == BEGIN:
        cache = backend.begin(backend.put(inputs["encoder_hidden_states"]))
        return _named(backend, cache, ("decoder", "encoder"))
    ids, mask = backend.put(inputs["input_ids"]), backend.put(inputs["encoder_attention_mask"])
    if verb == PREFILL:
        logits, cache = backend.prefill(ids, backend.put(inputs["encoder_hidden_states"]), mask)
        return {"logits": backend.get(logits)} | _named(backend, cache, ("decoder", "encoder"))
    if verb == STEP:
        logits, cache = backend.step(ids, mask, past_caches(backend, inputs))
        return {"logits": backend.get(logits)} | _named(backend, cache, ("decoder",))
    if verb == BRANCH:
        logits, cache = backend.branch(ids, mask, backend.put(inputs["seen"]), past_caches(backend, inputs))
        return {"logits": backend.get(logits)} | _named(backend, cache, ("decoder",))
    raise ValueError(f"verb is {verb!r}, expected one of {', '.join((*VERBS, BEGIN, BRANCH))}")


def _named(backend: Backend[Tensor], cache: Cache[Tensor], sides: tuple[str, ...]) -> dict[str, Array]:
    return {
        f"present.{index}.{side}.{kind}": backend.get(getattr(layer, f"{side}_{kind}"))
        for index, layer in enumerate(cache)
        for side in sides
        for kind in ("key", "value")
    }


def past_caches(backend: Backend[Tensor], inputs: Mapping[str, Array]) -> Cache[Tensor]:
    """The caches among the `inputs` of a step or a branch."""
    layers = sum(name.endswith(".decoder.key") for name in inputs)
    return tuple(
        LayerCache(
            *(
                backend.put(inputs[f"past_key_values.{index}.{side}.{kind}"])
                for side in ("decoder", "encoder")
                for kind in ("key", "value")
            )
        )
        for index in range(layers)
    )
