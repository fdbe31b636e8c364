"""Attention without padding: the texts of a device batch end to end, each attending to itself.

Transformers lets a model's attention be replaced, and sentence-transformers' pooling takes texts
that lie end to end, so that no architecture needs code of its own.
"""

import logging
import statistics
from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.base.modules import Transformer
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines.calibration import calibration_pass
from embedfarm.workers.engines.engine import DeviceFailed
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine

NAME: Final = "embedfarm-unpadded"
# What a model passes on to its attention, though its forward pass may not name it.
PASSED_ON: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
IMPOSSIBLE: Final = ("softcap", "s_aux", "position_bias")  # what some models' attention has
EVERYTHING: Final = -1  # FlashAttention's word for a window without an end
# What lets keys have fewer heads than queries; with torch 2.11 they may have without it.
FEWER_HEADS: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)
COSINE_MIN: Final = 0.999  # of any text, with and without padding, in the model's own precision
ROUNDS: Final = 3

log = logging.getLogger(__name__)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **options: Any,  # noqa: ANN401 # a protocol of transformers
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers asks for it, of texts that lie end to end.

    On a GPU it is one kernel, FlashAttention's; on a CPU it is one text after the other.

    Args:
        module: The attention that is replaced.
        query: Queries, shape (1, heads, tokens, size of a head).
        key: Keys, in the shape of the queries, perhaps with fewer heads.
        value: Values, in the shape of the keys.
        attention_mask: Always None, since there is no padding.
        options: "cu_seq_lens_q", where texts begin and the last one ends; "max_length_q", the
            tokens of the longest; "scaling" of the products; "sliding_window", which includes the
            token itself; "is_causal", if not as `module` says.

    Returns:
        The attended values, shape (1, tokens, heads, size of a head), and no weights.

    Raises:
        ModelError: The model's attention asks for more, something in `IMPOSSIBLE`.
    """
    del attention_mask
    more = [name for name in IMPOSSIBLE if options.get(name) is not None]
    if more:
        raise ModelError(f"its attention has {', '.join(more)}")
    window, causal = options.get("sliding_window"), options.get("is_causal")
    reach = EVERYTHING if window is None else window - 1
    if causal is None:
        causal = getattr(module, "is_causal", False)
    scale, bounds = options.get("scaling"), options["cu_seq_lens_q"]
    grouped = query.shape[1] != key.shape[1]
    if query.device.type == "cpu":
        texts = [
            scaled_dot_product_attention(
                query[:, :, first:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=_mask(end - first, reach, causal=causal),
                scale=scale,
                enable_gqa=grouped,
            )
            for first, end in pairwise(bounds.tolist())
        ]
        return torch.cat(texts, dim=2).transpose(1, 2), None
    longest = options["max_length_q"]
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_q=bounds,
        cu_seq_k=bounds,
        max_q=longest,
        max_k=longest,
        scale=scale,
        window_size=(reach, 0 if causal else reach),
        **(FEWER_HEADS if grouped else {}),
    )
    return cast("torch.Tensor", attended)[None], None


def _mask(length: int, reach: int, *, causal: bool) -> torch.Tensor | None:
    """Tell which tokens see which, shape (length, length); None where all see all."""
    seen = length if reach == EVERYTHING else reach
    if seen >= length and not causal:
        return None
    places = torch.arange(length)
    distances = places[:, None] - places
    return (distances.abs() <= seen) & ((distances >= 0) | (not causal))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def unpad(engine: SentenceTransformerEngine) -> Callable[[], None]:
    """Have a model attend without padding.

    Returns:
        A function that has the model attend as before.

    Raises:
        ModelError: The model's attention cannot be replaced.
    """
    first = engine.model[0]
    if not isinstance(first, Transformer) or not first.auto_model.is_backend_compatible():
        raise ModelError("its attention cannot be replaced")
    transformer = cast("PreTrainedModel", first.auto_model)
    before = transformer.config._attn_implementation  # noqa: SLF001 # no public question
    transformer.set_attn_implementation(NAME)
    if first.model_forward_params is not None:
        first.model_forward_params |= {*PASSED_ON, "seq_idx"}
    engine.first_position = first._infer_flatten_position_offset()  # noqa: SLF001 # the same

    def undo() -> None:
        transformer.set_attn_implementation(before)
        engine.first_position = None

    return undo


def unpad_if_faster(engine: SentenceTransformerEngine) -> None:
    """Have a model attend without padding if that gives the same vectors, and sooner.

    It takes a few passes over some texts, seconds at most.

    Raises:
        DeviceFailed: Nothing works on this device any more.
    """
    try:
        undo = unpad(engine)
    except ModelError as error:
        log.info("%s is padded: %s", engine.spec.model, error)
        return
    try:
        unpadded, seconds = _measure(engine)
        undo()
        padded, padded_seconds = _measure(engine)
    except DeviceFailed:
        raise
    except Exception as error:  # noqa: BLE001 # a model may raise anything; it still embeds padded
        undo()
        log.info("%s is padded: %s", engine.spec.model, error)
        return
    gain, least = padded_seconds / seconds, float(cosine(unpadded, padded).min())
    log.info(
        "%s without padding: %.2f times as fast, cosine %.5f at least",
        *(engine.spec.model, gain, least),
    )
    if least >= COSINE_MIN and gain > 1:
        unpad(engine)


def _measure(engine: SentenceTransformerEngine) -> tuple[NDArray[np.float32], float]:
    """Embed some texts; return the vectors, and the median of the seconds that they take."""
    calibration_pass(engine)  # it warms up
    passes = [calibration_pass(engine) for _ in range(ROUNDS)]
    return passes[0][0], statistics.median(seconds for _, seconds in passes)
