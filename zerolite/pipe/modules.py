"""`PipelineModule`: models written as a sequence of layers, each built only on its own stage."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerolite.comm import ranks_of_job


class LayerSpec:
    """A layer that is built only on the rank that runs it, by ``cls(*args, **kwargs)``.

    ``cls`` is a class of modules, or a function that returns one. Raises ValueError if it cannot be called.
    """

    def __init__(self, cls: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if not callable(cls):
            raise ValueError(f"LayerSpec: expected a class of modules, got {type(cls).__name__}; pass the class itself")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        """Name of the class."""
        return getattr(self.cls, "__name__", type(self.cls).__name__)

    def build(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.args] + [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.name, *arguments])})"


class TiedLayerSpec(LayerSpec):
    """A layer that is used several times, under the same ``key``: one module, whose gradients are summed over stages.

    Raises ValueError if ``key`` is not a string.

    Args:
        forward_fn: called with (module, inputs) in place of the module's forward, for example to use an embedding as
            the head.
        tied_weight_attr: DeepSpeed's argument: names of attributes that the module must have. Here all parameters of
            the module are shared.
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., object],
        *args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **kwargs: Any,
    ) -> None:
        if not isinstance(key, str):
            raise ValueError(
                f"TiedLayerSpec: expected the key, a string, before the class, got {type(key).__name__}; write "
                'TiedLayerSpec("embedding", nn.Embedding, ...)'
            )
        super().__init__(cls, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class _Layers(nn.Module):
    """Children, named by their index in the sequence."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _after_build(method: Method) -> Method:
    """Return a method of PipelineModule that builds the layers of a single stage first."""

    @functools.wraps(method)
    def call(module: PipelineModule, *args: Any, **kwargs: Any) -> object:
        module._build_if_alone()
        return method(module, *args, **kwargs)

    return call  # type: ignore[return-value]


class PipelineModule(nn.Module):
    """A sequence of layers, each called with the result of the one before: a tensor or a tuple of tensors.

    Parameters are named ``layers.<index>.…`` on any number of stages; those of a tied layer by its first index. Layers
    of specs are built in ``zerolite.initialize``, which knows the ranks that need them. In a job of one process they
    are built at the first use. Before that, an access to parameters raises RuntimeError. With one stage it is an
    ordinary module, and a call runs all layers. Raises ValueError for arguments that it does not accept.

    Args:
        layers: modules, functions, :class:`LayerSpec` and :class:`TiedLayerSpec`.
        loss_fn: called with (outputs of the last layer, targets), returns a scalar, for ``engine.train_batch``; None if
            the last layer returns the loss.
        num_stages: number of stages, equal to the config's ``pipeline.stages``; None: the config's.
        partition_method: "parameters", "uniform" or "type:REGEX"; None: the config's.
        activation_checkpoint_interval: number of layers whose activations are recomputed together in backward; 0: none;
            None: the config's.
        checkpointable_layers: class names; other layers keep their activations.
        seed_layers: build each layer with its own seed, so that its values do not depend on the number of stages.
        base_seed: number to which the layer's index is added to get its seed; default: ``torch.initial_seed()`` of the
            first rank.
        seed_fn: called with the seed in place of ``torch.manual_seed``.
        dynamic_shape: accepted and ignored: shapes may always change from step to step.
    """

    is_pipeline_module = True

    def __init__(
        self,
        layers: Iterable[Any],
        loss_fn: Callable[[Any, Any], Any] | None = None,
        num_stages: int | None = None,
        partition_method: str | None = None,
        activation_checkpoint_interval: int | None = None,
        seed_layers: bool = True,
        base_seed: int | None = None,
        *,
        seed_fn: Callable[[int], Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        topology: object = None,
        activation_checkpoint_func: object = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        self._check_arguments(loss_fn, num_stages, topology, activation_checkpoint_func)
        self.specs = list(layers)
        if not self.specs:
            raise ValueError("PipelineModule: expected at least one layer, got none")
        for index, layer in enumerate(self.specs):
            if not callable(layer) and not isinstance(layer, LayerSpec):
                raise ValueError(
                    f"PipelineModule: expected layer {index} to be a module, a function or a LayerSpec, got "
                    f"{type(layer).__name__}"
                )
        self.loss_fn, self.num_stages, self.partition_method = loss_fn, num_stages, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = None if checkpointable_layers is None else tuple(checkpointable_layers)
        self.seed_layers, self.base_seed, self.seed_fn = seed_layers, base_seed, seed_fn
        self.layers = _Layers()
        self.functions: dict[int, Callable[[Any], Any]] = {}  # layers of this rank, by index
        self._modules_of_key: dict[str, nn.Module] = {}
        self.first_indices = _first_indices(self.specs)
        if not any(isinstance(layer, LayerSpec) for layer in self.specs):
            self.build(range(len(self.specs)))

    @staticmethod
    def _check_arguments(loss_fn: object, num_stages: object, topology: object, checkpoint_func: object) -> None:
        if loss_fn is not None and not callable(loss_fn):
            raise ValueError(
                f"PipelineModule: expected loss_fn to be a function of outputs and targets, got {loss_fn!r}; pass a "
                "number of stages as num_stages="
            )
        if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
            raise ValueError(f"PipelineModule: expected num_stages to be an integer of at least 1, got {num_stages!r}")
        if topology is not None:
            raise ValueError(
                "PipelineModule: expected no topology; the config sets the grid by pipeline.stages and "
                "tensor_parallel.size"
            )
        if checkpoint_func is not None:
            raise ValueError(
                "PipelineModule: expected no activation_checkpoint_func; layers are checkpointed with "
                "torch.utils.checkpoint(..., use_reentrant=False)"
            )

    def apply_config_defaults(self, activation_checkpoint_interval: int, partition_method: str) -> None:
        """Use the config's settings for arguments that the constructor was not given."""
        if self.activation_checkpoint_interval is None:
            self.activation_checkpoint_interval = activation_checkpoint_interval
        if self.partition_method is None:
            self.partition_method = partition_method

    # ---------------------------------------------------------------- building

    @property
    def built(self) -> bool:
        """True if this rank's layers have been built."""
        return bool(self.functions)

    def build(self, indices: Iterable[int], device: torch.device | None = None) -> None:
        """Build the layers at ``indices`` that do not exist yet, and drop all others.

        Args:
            indices: indices in the sequence.
            device: device to move them to; default: where their classes put them.
        """
        built = self.functions
        self.functions = {index: built[index] if index in built else self._build(index, device) for index in indices}

    def _build(self, index: int, device: torch.device | None) -> Callable[[Any], Any]:
        layer = self.specs[index]
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self._modules_of_key:
                first = self.first_indices[index]
                self._modules_of_key[layer.key] = self._add(first, self._build_spec(first, self.specs[first]), device)
            module = self._modules_of_key[layer.key]
            for name in layer.tied_weight_attr:
                try:
                    operator.attrgetter(name)(module)
                except AttributeError:
                    raise ValueError(
                        f"TiedLayerSpec: expected the tied layer '{layer.key}' ({layer.name}) to have '{name}', got "
                        "none; pass tied_weight_attr"
                    ) from None
            return module if layer.forward_fn is None else functools.partial(layer.forward_fn, module)
        built = self._build_spec(index, layer) if isinstance(layer, LayerSpec) else layer
        if isinstance(built, nn.Module) or not callable(built):
            self._add(self.first_indices[index], built, device)
        return built

    def _build_spec(self, index: int, spec: LayerSpec) -> Any:
        if not self.seed_layers:
            return spec.build()
        seed = (torch.initial_seed() if self.base_seed is None else self.base_seed) + index
        with torch.random.fork_rng():
            (self.seed_fn or torch.manual_seed)(seed)
            return spec.build()

    def _add(self, index: int, module: object, device: torch.device | None) -> Any:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"PipelineModule: expected layer {index} ({self.specs[index]!r}) to build a module, got "
                f"{type(module).__name__}"
            )
        if str(index) not in self.layers._modules:
            self.layers.add_module(str(index), module if device is None else module.to(device))
            self.layers._modules = dict(sorted(self.layers._modules.items(), key=lambda item: int(item[0])))
        return module

    def _build_if_alone(self) -> None:
        """Build the single stage in a job of one process."""
        if self.built:
            return
        ranks = ranks_of_job()
        if ranks > 1 and self.num_stages != 1:
            raise RuntimeError(
                f"PipelineModule: expected no access to parameters or outputs before zerolite.initialize, which builds "
                f"on each of the {ranks} ranks the layers that it needs. Let initialize make the optimizer (the "
                "config's block, or a function of the parameters), or pass num_stages=1"
            )
        self.build(range(len(self.specs)))

    named_parameters = _after_build(nn.Module.named_parameters)
    get_submodule = _after_build(nn.Module.get_submodule)
    state_dict = _after_build(nn.Module.state_dict)
    load_state_dict = _after_build(nn.Module.load_state_dict)
    apply = _after_build(nn.Module.apply)
    _apply = _after_build(nn.Module._apply)  # .to(), .half() and the like

    # ---------------------------------------------------------------- running

    def forward(self, *inputs: Any) -> Any:
        """Run all layers; several inputs become a tuple for the first one.

        Raises RuntimeError on a rank that has only some layers.
        """
        self._build_if_alone()
        if len(self.functions) < len(self.specs):
            raise RuntimeError(
                f"PipelineModule: expected engine.train_batch or engine.eval_batch, got a forward on a rank that has "
                f"only layers {min(self.functions)} to {max(self.functions)} of {len(self.specs)}"
            )
        return self.run(range(len(self.specs)), inputs[0] if len(inputs) == 1 else inputs)

    def run(self, indices: Sequence[int], value: object) -> Any:
        """Run the layers at ``indices``, which are consecutive, on ``value``."""
        return run_layers(
            [self.functions[index] for index in indices], value, self.interval, self.checkpointable_layers
        )

    @property
    def interval(self) -> int:
        return self.activation_checkpoint_interval or 0

    def class_names(self) -> list[str]:
        """Return the class names of all layers, for partition_method "type:REGEX"."""
        return [layer.name if isinstance(layer, LayerSpec) else layer_name(layer) for layer in self.specs]


def run_layers(
    layers: Sequence[Callable[[Any], Any]],
    value: object,
    interval: int = 0,
    checkpointable: Sequence[str] | None = None,
) -> Any:
    """Run ``layers`` one after the other on ``value``.

    Args:
        layers: the layers.
        value: input of the first layer.
        interval: number of layers in a group that keeps only its inputs and recomputes the rest in backward; 0: none.
        checkpointable: class names of the layers that may be recomputed.
    """
    if not interval or not torch.is_grad_enabled():
        for layer in layers:
            value = layer(value)
        return value
    for start in range(0, len(layers), interval):
        group = layers[start : start + interval]
        if checkpointable is None or all(layer_name(layer) in checkpointable for layer in group):
            value = checkpoint(run_layers, group, value, use_reentrant=False)
        else:
            value = run_layers(group, value)
    return value


def layer_name(layer: object) -> str:
    """Return the class name of a module, or a function's own name."""
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def trained_numel(layer: Any) -> int:
    """Return the number of elements of ``layer``'s trained parameters. A spec is built without memory if possible."""
    if isinstance(layer, LayerSpec):
        try:
            with torch.device("meta"):
                layer = layer.build()
        except Exception:  # a class that reads its own initial values cannot be built on the meta device
            with torch.random.fork_rng():
                layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def _first_indices(layers: Sequence[object]) -> list[int]:
    """Return for each index the first index of the same layer."""
    seen: dict[Any, int] = {}
    indices = []
    for index, layer in enumerate(layers):
        key = ("tied", layer.key) if isinstance(layer, TiedLayerSpec) else index
        indices.append(seen.setdefault(id(layer) if isinstance(layer, nn.Module) else key, index))
    return indices
