"""Gradients of encoders that see a part of the rows at a time, by a loss of all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxloss.core import batch, checks


def cached_value_and_grad(
    loss: Callable[..., Any],
    encoders: Callable[..., Any] | tuple[Callable[..., Any], ...],
    *,
    chunks: int,
    has_aux: bool = False,
) -> Callable[..., Any]:
    r"""The exact gradient of a loss of all rows, with the activations of one chunk of them.

    .. math:: \frac{∂\ell}{∂θ} = \sum_c \Big(\frac{∂f(x_c; θ)}{∂θ}\Big)^T \frac{∂\ell}{∂f(x_c; θ)},
       \quad c = 1, …, \text{chunks}

    Rows are encoded without a graph, and the loss and its gradient by the features computed once.
    Then each chunk is encoded again with that gradient: one forward pass more, and the activations
    of one chunk. With batch normalisation, which has the statistics of a chunk here, it is not the
    gradient of the whole batch.

    Args:
      loss: A function of the features of each encoder, `[n, d]` or pytrees of arrays `[n, ...]`, to
        a scalar. An encoder can return a learned temperature once for each row; take their mean.
      encoders: A function `(params, inputs) -> features`, or `(params, inputs, key)`, or a tuple of
        them. Inputs and features are pytrees of arrays `[n, ...]`.
      chunks: How many chunks the rows of each encoder are cut into, which divides their number.
      has_aux: Whether the loss returns a pair, of which the second is passed on.

    Returns:
      A function `(params, inputs, keys=None)`, of tuples for a tuple of encoders, to `(value,
      gradients)` or `((value, aux), gradients)`. `keys` are a random key for each encoder, or one
      for all, such as for dropout: each chunk has its own, the same in both passes. Call it in
      `jax.jit`, and over devices in `jax.shard_map` with a loss that has `axis_name`.

    Raises:
      ValueError: If `chunks` is below 1 or does not divide the rows; if there are not as many
        params, inputs or keys as encoders.

    Example:
      >>> import jax, jax.numpy as jnp, jaxloss
      >>> def encode(weights, inputs):
      ...     return jnp.tanh(inputs @ weights)
      >>> run = jaxloss.cached_value_and_grad(jaxloss.info_nce_loss, (encode, encode), chunks=4)
      >>> weights, inputs = (jnp.eye(3), 2 * jnp.eye(3)), (jnp.ones((8, 3)), jnp.ones((8, 3)))
      >>> value, (of_queries, of_keys) = jax.jit(run)(weights, inputs)
      >>> print(f"{value:.4f}", of_queries.shape)
      2.0794 (3, 3)

    References:
      Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup,
      RepL4NLP 2021 (gradient cache).
    """
    checks.positive_count("chunks", chunks)
    if isinstance(encoders, list):
        raise TypeError("`encoders` must be a function or a tuple of functions, got a list")
    is_tuple = isinstance(encoders, tuple)
    functions: tuple[Any, ...] = encoders if isinstance(encoders, tuple) else (encoders,)

    def run(params: Any, inputs: Any, keys: Any = None) -> Any:
        if not is_tuple:
            params, inputs, keys = (params,), (inputs,), None if keys is None else (keys,)
        elif keys is not None and not isinstance(keys, tuple):
            keys = tuple(jax.random.fold_in(keys, k) for k in range(len(functions)))
        for name, given in (("params", params), ("inputs", inputs), ("keys", keys)):
            if given is None and name == "keys":
                continue
            if not isinstance(given, tuple) or len(given) != len(functions):
                found = len(given) if isinstance(given, tuple) else type(given).__name__
                wanted = f"a tuple of {len(functions)}, one for each encoder"
                raise ValueError(f"`{name}` must be {wanted}, got {found}")
        parts: list[Any] = [(_in_chunks(x, chunks),) for x in inputs]
        if keys is not None:
            split = (jax.random.split(key, chunks) for key in keys)
            parts = [(*part, key) for part, key in zip(parts, split, strict=True)]
        every = list(zip(functions, params, parts, strict=True))
        blocks = [lax.map(lambda x, f=f, p=p: f(p, *x), part) for f, p, part in every]
        features = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)
        of_features = jax.value_and_grad(loss, tuple(range(len(every))), has_aux=has_aux)
        value, cotangents = of_features(*features)
        cotangents = jax.tree.map(lambda x, block: x.reshape(block.shape), [*cotangents], blocks)
        gradients = tuple(map(_gradient, *zip(*every, strict=True), cotangents))
        return value, gradients if is_tuple else gradients[0]

    return run


def _in_chunks(inputs: Any, chunks: int) -> Any:
    def cut(leaf: Any) -> Any:
        array = checks.as_array("inputs", leaf)
        if not array.ndim or array.shape[0] % chunks:
            raise ValueError(
                f"`inputs` must have rows that `chunks` = {chunks} divides, got {array.shape}"
            )
        return array.reshape(chunks, array.shape[0] // chunks, *array.shape[1:])

    return jax.tree.map(cut, inputs)


def _gradient(function: Callable[..., Any], params: Any, parts: Any, cotangents: Any) -> Any:
    """Returns the gradient by the parameters, added up in float32 or wider."""
    # Marked as different on each device, so that gradients are added up over devices once.
    marked, of_params = jax.vjp(lambda params: batch.vary_alike((params, cotangents))[0], params)

    def add(total: Any, chunk: Any) -> tuple[Any, None]:
        part, cotangent = chunk
        (found,) = jax.vjp(lambda params: function(params, *part), marked)[1](cotangent)
        return jax.tree.map(jnp.add, total, found), None

    def zeros(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

    none = batch.vary_alike((jax.tree.map(zeros, params), cotangents))[0]
    total, _ = lax.scan(add, none, (parts, cotangents))
    return of_params(jax.tree.map(lambda x, like: x.astype(like.dtype), total, marked))[0]
