"""Parallel blocks: column-parallel layers, their row-parallel layers, and the modules between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from zerolite.tensor_parallel.plan import Style, TensorPlanError, is_container, linear_shape

# Names in the code of models (transformers, timm, LLaMA and the like). Attributes with numbers of heads or widths are
# divided by the number of ranks. Names of layers show which outputs are query, key and value.
HEADS = (
    "heads n_head n_heads nhead num_heads num_head n_local_heads num_attention_heads num_q_heads num_query_heads "
    "n_kv_head n_kv_heads kv_heads num_kv_heads n_local_kv_heads num_key_value_heads num_kv"
).split()
WIDTHS = (
    "embed_dim split_size hidden_size all_head_size inner_dim n_embd d_model dim width kv_dim q_size kv_size "
    "inner_size attention_size num_embd q_dim q_width kv_width"
).split()
HEAD_WIDTHS = (
    "head_dim head_size head_width head_features d_head dim_head dim_per_head attention_head_size d_kv d_k "
    "key_value_proj_dim"
).split()
FUSED_ATTENTION = (
    "qkv qkv_proj query_key_value c_attn in_proj wqkv w_pack to_qkv attn_qkv qkv_layer qkv_linear proj_qkv c_qkv"
).split()
SEPARATE_ATTENTION = (
    "q k v q_proj k_proj v_proj query key value wq wk wv to_q to_k to_v q_lin k_lin v_lin q_attn"
).split()


_ATTENTION = frozenset((*FUSED_ATTENTION, *SEPARATE_ATTENTION))


@dataclass
class Layer:
    """A layer that is sharded.

    Attributes:
        name: its name in the model.
        module: the layer.
        style: how it is sharded.
        sizes: sizes of the parts that a column fuses (query, key and value).
        shared: for each of these parts, True if several ranks compute the same head: see :func:`share_heads`.
        head_width: width of a head in the shared parts.
    """

    name: str
    module: nn.Module
    style: Style
    sizes: list[int] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)
    head_width: int = 0

    def set_sizes(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def share_parts(self, shared: list[bool], head_width: int) -> None:
        self.shared, self.head_width = shared, head_width

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2].lower()

    @property
    def inputs(self) -> int:
        return linear_shape(self.module)[1]

    @property
    def outputs(self) -> int:
        return linear_shape(self.module)[2]


@dataclass
class ParallelBlock:
    """The innermost module with column-parallel layers and their row-parallel layers: attention or an MLP.

    Attributes:
        name: its name in the model.
        module: the module.
        columns: the column-parallel layers.
        rows: the row-parallel layers.
        inner_modules: the module itself and the modules between it and its layers, by name.
    """

    name: str
    module: nn.Module
    columns: list[Layer]
    rows: list[Layer]
    inner_modules: dict[str, nn.Module]

    @property
    def is_attention(self) -> bool:
        names = {layer.last_name for layer in self.columns}
        return bool(names & _ATTENTION or self.numbers(HEADS))

    def module_of(self, layer: Layer) -> nn.Module:
        """Return the module that contains ``layer`` as a child."""
        return self.inner_modules.get(layer.parent, self.module)

    def numbers(self, names: Sequence[str]) -> list[Number]:
        """Return the positive integers in attributes of these names."""
        return [
            (where, name, value)
            for where, inner in self.inner_modules.items()
            for name in names
            if type(value := inner.__dict__.get(name)) is int and value > 0
        ]


Number = tuple[str, str, int]
"""An attribute of a module: the module's name, the attribute's, and its value."""

KEY_VALUE = frozenset("k v k_proj v_proj key value wk wv to_k to_v k_lin v_lin".split())
REPEATS = "num_key_value_groups num_kv_groups kv_groups n_rep num_rep num_queries_per_kv".split()
"""Attributes with the number of query heads that read one head of key and value."""


def find_parallel_blocks(layers: Sequence[Layer], modules: Mapping[str, nn.Module]) -> list[ParallelBlock]:
    """Group ``layers`` into parallel blocks. Raises TensorPlanError for a column or row without its counterpart."""
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        if (
            layer.style.sharding in ("column", "row")
            and not layer.style.gather_output
            and layer.style.input_is_parallel
        ):
            groups.setdefault(layer.parent, []).append(layer)
    tp_blocks = []
    while groups:
        # The deepest module first: a column that finds no row beside it is moved to the module above.
        name = max(groups, key=lambda name: (name.count(".") + bool(name), name))
        group = groups.pop(name)
        columns, rows = (
            [layer for layer in group if layer.style.sharding == sharding] for sharding in ("column", "row")
        )
        if columns and rows and not is_container(modules[name]):
            tp_blocks.append(
                ParallelBlock(name, modules[name], columns, rows, dict(_inner_modules(name, group, modules)))
            )
            continue
        above = name.rpartition(".")[0]
        alone = not (columns and rows)
        if not name or (alone and is_container(modules[above])):
            raise TensorPlanError(_unpaired(columns, rows, name), unsharded=name or None)
        groups.setdefault(above, []).extend(group)
    return tp_blocks


def _inner_modules(
    name: str, group: Sequence[Layer], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for layer in group:
        above = layer.parent
        while len(above) > len(name):
            yield above, modules[above]
            above = above.rpartition(".")[0]
    yield name, modules[name]


def _unpaired(columns: Sequence[Layer], rows: Sequence[Layer], name: str) -> str:
    where = f"in '{name}'" if name else "in the model"
    if columns:
        return (
            f"expected a row {where} for the column {_names(columns)}, because each rank has a part of its output, got "
            'none; add the layer that reads it as "row", or write {"style": "column", "gather_output": true}'
        )
    return (
        f"expected a column {where} for the row {_names(rows)}, because each rank reads a part of its input, got none; "
        'add the layer before it as "column", or write "rowwise_split_input"'
    )


def _names(layers: Sequence[Layer]) -> str:
    return ", ".join(f"'{layer.name}'" for layer in layers)


def head_width(tp_block: ParallelBlock) -> int | None:
    """Return the number of outputs of one head, which no shard may divide; None if heads are not known."""
    reads = {row.inputs for row in tp_block.rows}
    parts = {size for layer in tp_block.columns for size in layer.sizes}
    for _, _, value in tp_block.numbers(HEAD_WIDTHS):
        if any(read % value == 0 for read in reads):
            return value
    attention = {size for one in tp_block.columns if one.last_name in _ATTENTION for size in one.sizes}
    for _, _, heads in tp_block.numbers(HEADS):
        for read in sorted(reads & attention or reads & parts or reads):
            if read % heads == 0:
                return read // heads
    return None


def share_heads(tp_block: ParallelBlock, size: int) -> None:
    """Find key and value with fewer heads than ranks, and mark them as shared.

    Every rank keeps the full layer, and computes only the head that its queries read. Several ranks compute the same
    head.
    """
    width = head_width(tp_block) if tp_block.is_attention else None
    for layer in tp_block.columns:
        heads = [0 if width is None or part % width else part // width for part in layer.sizes]
        few = [0 < number < size and size % number == 0 for number in heads]
        fused = len(heads) == 3 and layer.last_name not in KEY_VALUE
        if layer.last_name in KEY_VALUE or fused:
            layer.share_parts([may and not (fused and index == 0) for index, may in enumerate(few)], width or 0)


def check_heads(tp_block: ParallelBlock, size: int) -> None:
    """Raise TensorPlanError if a head would be divided between ranks."""
    width = head_width(tp_block) if tp_block.is_attention else None
    named = [layer for layer in tp_block.columns if layer.last_name in _ATTENTION]
    for layer in named or tp_block.columns:
        for part, shared in zip(layer.sizes, layer.shared or [False] * len(layer.sizes), strict=True):
            if width is not None and part % width == 0 and part // width % size and not shared:
                heads = part // width
                more = " (fewer heads than ranks)" if heads < size else ""
                choose = f"; choose a size that divides {heads}" if heads > 1 else ""
                raise TensorPlanError(
                    f"expected a number of heads in '{layer.name}' that is a multiple of tensor_parallel.size {size}, "
                    f"got {heads} heads of width {width}{more}{choose}",
                    unsharded=tp_block.name,
                )


def numbers_to_divide(tp_block: ParallelBlock, size: int) -> list[Number]:
    """Return the attributes with numbers of heads and widths to divide, with this rank's share as the value.

    Raises TensorPlanError if attention has no attribute with its number of heads, or if ranks cannot have equal shares.
    """
    if not tp_block.is_attention:
        return []
    heads, width = tp_block.numbers(HEADS), head_width(tp_block)
    if width is None:
        raise TensorPlanError(
            f"expected the number of heads, or the width of one, in an attribute of '{tp_block.name}', got none of the "
            f"known names ({', '.join([*HEADS[:4], *HEAD_WIDTHS[:2]])}, ...) that fits; name the attributes that its "
            f'forward uses in tensor_parallel.divide, as ["{tp_block.name}.heads"], or write [] if it uses none',
            unsharded=tp_block.name,
        )
    shared = {
        part for one in tp_block.columns for part, is_shared in zip(one.sizes, one.shared, strict=False) if is_shared
    }
    reads = {row.inputs for row in tp_block.rows}
    parts = reads | {size for layer in tp_block.columns for size in layer.sizes}
    for layer in tp_block.columns:
        # In one part by heads, [groups, queries + key + value, width], the sizes do not contain that of key and value.
        if layer.last_name in FUSED_ATTENTION and len(layer.sizes) == 1:
            parts |= {(layer.outputs - read) // 2 for read in reads}
    counts = [(where, name, value) for where, name, value in heads if value * width in parts]
    if heads and not counts:
        got = ", ".join(f"{name} {value}" for _, name, value in heads)
        raise TensorPlanError(
            f"expected numbers of heads in '{tp_block.name}' that fit layers of {sorted(parts)} features, got {got}; "
            "name the attributes that its forward uses in tensor_parallel.divide",
            unsharded=tp_block.name,
        )
    widths = [one for one in tp_block.numbers(WIDTHS) if counts and one[2] in parts]
    shares = [
        (where, name, 1 if value * width in shared else share_of((where, name, value), size, where))
        for where, name, value in counts
    ]
    shares += [
        (where, name, width if value in shared else share_of((where, name, value), size, where))
        for where, name, value in widths
    ]
    if shared:  # each rank has one head of key and value, which all its queries read
        heads_of_keys = max(shared) // width
        shares += [(where, name, value * heads_of_keys // size) for where, name, value in tp_block.numbers(REPEATS)]
    return shares


def share_of(number: Number, size: int, unsharded: str | None = None) -> int:
    """Return a rank's share of a number. Raises TensorPlanError if ranks cannot have equal shares.

    Args:
        number: the attribute.
        size: number of ranks.
        unsharded: module that the error advises to leave unsharded.
    """
    where, name, value = number
    if value % size:
        raise TensorPlanError(
            f"expected '{name}' of '{where}' to be a multiple of tensor_parallel.size {size}, because each rank has an "
            f"equal share, got {value}; choose a size that divides {value}",
            unsharded=unsharded,
        )
    return value // size


def biases_of_heads(tp_block: ParallelBlock) -> list[tuple[nn.Module, str]]:
    """Return the position biases [..., heads] of attention as (module, key). They are sharded with the heads."""
    width = head_width(tp_block) if tp_block.is_attention else None
    if width is None:
        return []
    heads = {row.inputs // width for row in tp_block.rows}
    return [
        (module, key)
        for name, module in tp_block.module.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if f"{name}.{key}".endswith(_BIASES) and parameter.dim() > 1 and parameter.shape[-1] in heads
    ]


_BIASES = ("relative_attention_bias.weight", "relative_position_bias_table")
