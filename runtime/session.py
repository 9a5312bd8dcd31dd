"""The three verbs on ONNX Runtime. Tensors stay `OrtValue`s where they were computed, only logits come back."""

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime as ort
from onnxruntime import OrtValue

from .backend import Array, Cache, FloatArray, GraphVerbs, IntArray, LayerCache
from .bundle import Bundle
from .contract import (
    BEGIN,
    ENCODE,
    GRAPH_FILES,
    PREFILL,
    RANK,
    SELECT,
    GraphSpec,
    TensorSpec,
    contract_problems,
    graph_specs,
)
from .errors import BundleError, GraphError, ProviderError
from .threads import available_cpus, set_threads

Provider = Literal["cpu", "cuda"]
Optimization = Literal["none", "basic", "extended", "all"]
EXECUTION_PROVIDERS: dict[Provider, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

OPTIMIZATIONS: dict[Optimization, ort.GraphOptimizationLevel] = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""How much ONNX Runtime rewrites a graph before it runs it, from nothing to everything."""

ELEMENT_TYPES = {"tensor(float)": "float32", "tensor(int64)": "int64"}
"""ONNX Runtime's names of the contract's types."""

MOST_THREADS = 256
"""Each of the sessions starts that many; some hundred thousand would take all memory before anything ran."""

SLOWER = ["SkipLayerNormFusion"]
"""Rewritings of graphs that cost time: on many rows the fused operator is slower than the two that it replaces."""

ONCE_A_BATCH = (ENCODE, PREFILL, BEGIN)
"""Graphs that give their memory back when they are done, since steps follow that need it. It costs no time."""

HEAVY = {"Attention", "Gather", "Gemm", "LayerNormalization", "MatMul", "Softmax"}
"""Operators that must run on the requested provider; shapes are computed on the CPU everywhere."""


class OrtBackend(GraphVerbs[OrtValue]):
    """Runs the graphs of a bundle; see `Backend` for the verbs.

    Args:
        bundle: The opened bundle.
        provider: Where to run.
        threads: Threads of one operator, all graphs alike; None for the CPUs that this process may use.
        optimization: How much ONNX Runtime may rewrite the graphs.
        allow_fallback: Take the CPU where `provider` cannot run the graphs, instead of refusing.
        checked: Refuse graphs that are not what the contract says; who examines a bundle wants to see them.

    Raises:
        ProviderError: `provider` is not there, or would leave heavy operators to the CPU; or `threads` is
            impossible.
        BundleError: ONNX Runtime cannot load a graph. On the CPU this comes when the graph is first used.

    Every verb raises `GraphError` when ONNX Runtime gives up on it.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        provider: Provider = "cpu",
        threads: int | None = None,
        optimization: Optimization = "all",
        allow_fallback: bool = False,
        checked: bool = False,
    ) -> None:
        if provider not in EXECUTION_PROVIDERS:
            raise ProviderError(f"provider is {provider!r}, expected one of {', '.join(EXECUTION_PROVIDERS)}")
        if threads is not None and not 1 <= threads <= MOST_THREADS:
            raise ProviderError(f"threads is {threads}, expected 1 to {MOST_THREADS}")
        if optimization not in OPTIMIZATIONS:
            raise ProviderError(f"optimization is {optimization!r}, expected one of {', '.join(OPTIMIZATIONS)}")
        self._graphs = _Graphs(bundle, provider, threads, optimization, checked=checked)
        missed = self._graphs.missed()
        if missed and not allow_fallback:
            raise ProviderError(
                f"{provider} was asked for, but would not run this bundle: {'; '.join(missed)}. "
                "Install what it needs, or run it on the CPU"
            )
        if missed:
            self._graphs = _Graphs(bundle, "cpu", threads, optimization, checked=checked)
        self.provider: Provider = "cpu" if missed else provider
        """Where the graphs really run."""
        self._dims = bundle.passport.dims
        self._bias: tuple[tuple[int, ...], OrtValue] | None = None
        super().__init__(self._dims.layers)

    def rank(self, logits: OrtValue, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
        """See `Backend.rank`."""
        kept = np.array([min(count, self._dims.vocab_size)])
        scores, tokens = self._outputs(RANK, [logits, self._forbidding(tuple(forbidden)), self.put(kept)])
        return self.get(scores), self.get(tokens)

    def select(self, cache: Cache[OrtValue], rows: IntArray) -> Cache[OrtValue]:
        """See `Backend.select`."""
        # The graph takes as many tensors as a decoder has on one side.
        target = self._select([tensor for layer in cache for tensor in layer[:2]], rows)
        source = self._select([tensor for layer in cache for tensor in layer[2:]], rows)
        return tuple(LayerCache(*ours, *theirs) for ours, theirs in zip(target, source, strict=True))

    def put(self, array: Array) -> OrtValue:
        """See `Backend.put`."""
        # A copy: a value that borrows an array's memory does not keep it alive for those who look into the value.
        value = OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, self._device)
        value.update_inplace(np.ascontiguousarray(array))
        return value

    def get(self, tensor: OrtValue) -> Array:
        """See `Backend.get`."""
        array: Array = tensor.numpy()
        return array

    def found_specs(self) -> dict[str, GraphSpec]:
        """Inputs and outputs that the graphs really have."""
        return {verb: self._graphs[verb].found_spec() for verb in GRAPH_FILES}

    def _outputs(self, verb: str, inputs: Iterable[OrtValue]) -> list[OrtValue]:
        return self._graphs[verb].run(inputs, self._device)

    def _forbidding(self, tokens: tuple[int, ...]) -> OrtValue:
        """What is added to logits, `(V,)`, to forbid `tokens`; the same for many steps."""
        if self._bias is None or self._bias[0] != tokens:
            bias = np.zeros(self._dims.vocab_size, np.float32)
            bias[list(tokens)] = -np.inf
            self._bias = tokens, self.put(bias)
        return self._bias[1]

    @property
    def _device(self) -> str:
        return self.provider

    def _select(self, tensors: Sequence[OrtValue], rows: IntArray) -> list[tuple[OrtValue, OrtValue]]:
        """`rows` of each tensor, in pairs of key and value."""
        picked = self._outputs(SELECT, [self.put(rows), *tensors])
        return list(zip(picked[::2], picked[1::2], strict=True))


class _Graphs:
    """The graphs of a bundle by verb. On the CPU each is loaded when it is first asked for: few tasks need them all."""

    def __init__(
        self, bundle: Bundle, provider: Provider, threads: int | None, optimization: Optimization, *, checked: bool
    ) -> None:
        self._bundle = bundle
        self._checked = checked
        self._provider: Provider = provider
        self._threads = threads
        self._optimization: Optimization = optimization
        self._specs = graph_specs(bundle.passport.dims)
        self._loaded: dict[str, _Graph] = {}

    def __getitem__(self, verb: str) -> "_Graph":
        if verb not in self._loaded:
            path, spec = self._bundle.path(verb), self._specs[verb]
            graph = _Graph(spec, path, self._provider, self._threads, self._optimization)
            problems = contract_problems({verb: spec}, {verb: graph.found_spec()}) if self._checked else []
            if problems:
                raise BundleError(f"{path} is not what its passport says: {'; '.join(problems)}")
            self._loaded[verb] = graph
        return self._loaded[verb]

    def missed(self) -> list[str]:
        """Why the provider would not run these graphs; nothing where it would."""
        if self._provider == "cpu":
            return []
        return list(dict.fromkeys(why for verb in self._specs if (why := self[verb].missed(self._provider))))


class _Graph:
    """One graph in one session."""

    def __init__(
        self, spec: GraphSpec, path: Path, provider: Provider, threads: int | None, optimization: Optimization
    ) -> None:
        self._spec = spec
        options = ort.SessionOptions()
        set_threads(options, spec.verb, threads or available_cpus())
        options.graph_optimization_level = OPTIMIZATIONS[optimization]
        options.log_severity_level = 4  # what is fatal comes as an exception
        options.enable_mem_pattern = False  # it keeps a plan for every shape that ever came
        options.enable_cpu_mem_arena = spec.verb not in ONCE_A_BATCH
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if provider == "cuda":
            _load_cuda_libraries()
        wanted = dict.fromkeys([EXECUTION_PROVIDERS[provider], EXECUTION_PROVIDERS["cpu"]])
        # ONNX Runtime warns about those that its build does not have; `missed` says it once.
        providers = [name for name in wanted if name in ort.get_available_providers()]
        try:
            self._session = ort.InferenceSession(path, options, providers, disabled_optimizers=SLOWER)
        except Exception as error:  # ONNX Runtime's own exceptions share no public base
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path}: {error}") from None

    def run(self, inputs: Iterable[OrtValue], device: str) -> list[OrtValue]:
        """Outputs for `inputs`, both in the order of the contract; they stay on `device`, but for logits."""
        binding = self._session.io_binding()
        for spec, value in zip(self._spec.inputs, inputs, strict=True):
            binding.bind_ortvalue_input(spec.name, value)
        for spec in self._spec.outputs:
            binding.bind_output(spec.name, "cpu" if spec.name == "logits" else device)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's own exceptions share no public base
            raise GraphError(f"ONNX Runtime {ort.__version__} gave up in {self._spec.verb}: {error}") from None
        outputs: list[OrtValue] = binding.get_outputs()
        return outputs

    def found_spec(self) -> GraphSpec:
        """Inputs and outputs that the graph really has, under the contract's type names."""

        def specs(arguments: Iterable[ort.NodeArg]) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(argument.name, ELEMENT_TYPES.get(argument.type, argument.type), tuple(argument.shape))
                for argument in arguments
            )

        return GraphSpec(self._spec.verb, specs(self._session.get_inputs()), specs(self._session.get_outputs()))

    def missed(self, provider: Provider) -> str | None:
        """Why `provider` would not run this graph, None where it would."""
        wanted = EXECUTION_PROVIDERS[provider]
        if wanted not in self._session.get_providers():
            return f"ONNX Runtime {ort.__version__} cannot use {wanted} here"
        elsewhere = {
            node.op_type
            for part in self._session.get_provider_graph_assignment_info()
            if part.ep_name != wanted
            for node in part.get_nodes()
        }
        heavy = sorted(elsewhere & HEAVY)
        return f"{', '.join(heavy)} of {self._spec.verb} would run on the CPU" if heavy else None


def _load_cuda_libraries() -> None:
    # Finds the libraries of NVIDIA's Python packages, and prints rather than raises where there are none.
    ort.set_default_logger_severity(4)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        ort.preload_dlls()
