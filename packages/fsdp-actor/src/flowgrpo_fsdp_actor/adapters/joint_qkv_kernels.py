"""The Triton kernels of `joint_qkv_fused`: projections in, heads of the joint attention out, and back.

A program owns one head of BLOCK tokens and walks ROWS rows with them: the rotary table and the adapter's second factor
stay where they are. The whole chain is float32 between the load and the store, so it rounds once. No program adds to
another's result and no sum depends on the batch: bits are the same in any batch, run after run.

Shapes: as in `joint_qkv`. A tile is BLOCK tokens; tiles of text come first, as text does in T.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        f"compiled replay on CUDA needs Triton, which does not import here ({error}): install a CUDA build of torch, "
        "or set --no-replay-compile"
    ) from error

COUNTS = ["image_tokens", "text_tokens", "B", "heads"]
"""Arguments whose values decide nothing in a kernel's code: another batch or text is not another compilation."""


@triton.jit
def _load_up(
    up_ptr, head, R: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DOT: tl.constexpr
):
    """[R, D] of one head: the adapter's second factor, transposed."""
    d = tl.arange(0, D_PAD)
    r = tl.arange(0, R_PAD)
    at = (head * D + d)[:, None] * R + r[None, :]
    return tl.trans(tl.load(up_ptr + at, mask=(d < D)[:, None] & (r < R)[None, :], other=0.0).to(DOT))


@triton.jit
def _load_heads(
    base_ptr, low_ptr, up, row, B, t, tokens, head, base_row, base_token, low_row, low_token,
    R: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK, D] of one row and head: base + low @ up."""
    d = tl.arange(0, D_PAD)
    inside = ((t < tokens) & (row < B))[:, None]
    at = row * base_row + t[:, None] * base_token + (head * D + d)[None, :]
    x = tl.load(base_ptr + at, mask=inside & (d < D)[None, :], other=0.0).to(tl.float32)
    if R > 0:
        r = tl.arange(0, R_PAD)
        at = row * low_row + t[:, None] * low_token + r[None, :]
        low = tl.load(low_ptr + at, mask=inside & (r < R)[None, :], other=0.0)
        # Of float32 alone: three tf32 products, as exact as float32's own and on the matrix unit.
        x = tl.dot(low.to(DOT), up, acc=x, input_precision="tf32x3")
    return x


@triton.jit
def _load_turn(table_ptr, norm_ptr, t, tokens, D: tl.constexpr, D_PAD: tl.constexpr):
    """cos and sin [BLOCK, D / 2] of the tokens, and the norm's weights of even and odd elements."""
    half = tl.arange(0, D_PAD // 2)
    inside = (t < tokens)[:, None] & (half < D // 2)[None, :]
    at = t[:, None] * (D // 2) + half[None, :]
    cos = tl.load(table_ptr + at, mask=inside, other=0.0)
    sin = tl.load(table_ptr + tokens * (D // 2) + at, mask=inside, other=0.0)
    even = tl.load(norm_ptr + 2 * half, mask=half < D // 2, other=0.0).to(tl.float32)
    odd = tl.load(norm_ptr + 2 * half + 1, mask=half < D // 2, other=0.0).to(tl.float32)
    return cos, sin, even[None, :], odd[None, :]


@triton.jit
def _pairs(x, BLOCK: tl.constexpr, D_PAD: tl.constexpr):
    """Even and odd elements of the last dimension."""
    return tl.split(tl.reshape(x, [BLOCK, D_PAD // 2, 2]))


@triton.jit
def _unpaired(even, odd, BLOCK: tl.constexpr, D_PAD: tl.constexpr):
    return tl.reshape(tl.join(even, odd), [BLOCK, D_PAD])


@triton.jit
def _rms_scale(even, odd, eps, D: tl.constexpr):
    """[BLOCK, 1] one over the root mean square of each head."""
    return tl.rsqrt(tl.sum(even * even + odd * odd, axis=1) / D + eps)[:, None]


@triton.jit
def _forward_stream(
    base_ptr, low_ptr, up_ptr, norm_ptr, table_ptr, out_ptr, tile, first, tokens, B, T, heads, eps,
    base_row, base_token, low_row, low_token,
    R: tl.constexpr, R_PAD: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DOT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head of one tile of a stream whose first token is `first` of T, in ROWS rows."""
    head = tl.program_id(0)
    first_row = tl.program_id(2).to(tl.int64) * ROWS
    d = tl.arange(0, D_PAD)
    t = tile * BLOCK + tl.arange(0, BLOCK)
    up = None
    if R > 0:
        up = _load_up(up_ptr, head, R, R_PAD, D, D_PAD, DOT)
    if NORM:
        cos, sin, norm_even, norm_odd = _load_turn(table_ptr, norm_ptr, t, tokens, D, D_PAD)
    for index in tl.range(0, ROWS, num_stages=STAGES):
        row = first_row + index
        x = _load_heads(
            base_ptr, low_ptr, up, row, B, t, tokens, head, base_row, base_token, low_row, low_token,
            R, R_PAD, D, D_PAD, DOT,
        )  # fmt: skip
        if NORM:
            even, odd = _pairs(x, BLOCK, D_PAD)
            scale = _rms_scale(even, odd, eps, D)
            even = even * scale * norm_even
            odd = odd * scale * norm_odd
            x = _unpaired(even * cos - odd * sin, even * sin + odd * cos, BLOCK, D_PAD)
        at = ((row * T + first + t[:, None]) * heads + head) * D + d[None, :]
        inside = ((t < tokens) & (row < B))[:, None] & (d < D)[None, :]
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    image_ptr,  # [B, P, E] by its strides of row and token, as are text and both low
    image_low_ptr,
    image_up_ptr,  # [E, R] contiguous
    image_norm_ptr,  # [D]
    text_ptr,
    text_low_ptr,
    text_up_ptr,
    text_norm_ptr,
    image_table_ptr,  # [2, P, D / 2] float32, contiguous
    text_table_ptr,
    out_ptr,  # [B, T, H, D] contiguous
    image_tokens, image_row, image_token, image_low_row, image_low_token,
    text_tokens, text_row, text_token, text_low_row, text_low_token,
    B, heads, eps,
    IMAGE_R: tl.constexpr, IMAGE_R_PAD: tl.constexpr, TEXT_R: tl.constexpr, TEXT_R_PAD: tl.constexpr,
    NORM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DOT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    text_tiles = tl.cdiv(text_tokens, BLOCK)
    T = text_tokens + image_tokens
    if tile < text_tiles:
        _forward_stream(
            text_ptr, text_low_ptr, text_up_ptr, text_norm_ptr, text_table_ptr, out_ptr,
            tile, 0, text_tokens, B, T, heads, eps, text_row, text_token, text_low_row, text_low_token,
            TEXT_R, TEXT_R_PAD, NORM, D, D_PAD, DOT, BLOCK, ROWS, STAGES,
        )  # fmt: skip
    else:
        _forward_stream(
            image_ptr, image_low_ptr, image_up_ptr, image_norm_ptr, image_table_ptr, out_ptr,
            tile - text_tiles, text_tokens, image_tokens, B, T, heads, eps,
            image_row, image_token, image_low_row, image_low_token,
            IMAGE_R, IMAGE_R_PAD, NORM, D, D_PAD, DOT, BLOCK, ROWS, STAGES,
        )  # fmt: skip


@triton.jit
def _backward_stream(
    grad_ptr, base_ptr, low_ptr, up_ptr, norm_ptr, table_ptr, out_ptr, norm_sums_ptr,
    tile, first, tokens, B, heads, eps, grad_row, grad_token, grad_head, base_row, base_token, low_row, low_token,
    R: tl.constexpr, R_PAD: tl.constexpr, NEED_NORM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DOT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first_row = tl.program_id(2).to(tl.int64) * ROWS
    d = tl.arange(0, D_PAD)
    t = tile * BLOCK + tl.arange(0, BLOCK)
    up = None
    if R > 0:
        up = _load_up(up_ptr, head, R, R_PAD, D, D_PAD, DOT)
    cos, sin, norm_even, norm_odd = _load_turn(table_ptr, norm_ptr, t, tokens, D, D_PAD)
    norm_even_sum = tl.zeros([D_PAD // 2], tl.float32)
    norm_odd_sum = tl.zeros([D_PAD // 2], tl.float32)
    for index in tl.range(0, ROWS, num_stages=STAGES):
        row = first_row + index
        x = _load_heads(
            base_ptr, low_ptr, up, row, B, t, tokens, head, base_row, base_token, low_row, low_token,
            R, R_PAD, D, D_PAD, DOT,
        )  # fmt: skip
        inside = ((t < tokens) & (row < B))[:, None] & (d < D)[None, :]
        at = row * grad_row + (first + t[:, None]) * grad_token + head * grad_head + d[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        turned_even, turned_odd = _pairs(grad, BLOCK, D_PAD)
        grad_even = turned_even * cos + turned_odd * sin  # turned back
        grad_odd = turned_odd * cos - turned_even * sin
        even, odd = _pairs(x, BLOCK, D_PAD)
        scale = _rms_scale(even, odd, eps, D)
        even *= scale
        odd *= scale
        if NEED_NORM:
            norm_even_sum += tl.sum(grad_even * even, axis=0)
            norm_odd_sum += tl.sum(grad_odd * odd, axis=0)
        grad_even *= norm_even
        grad_odd *= norm_odd
        # The part along the head itself, which the norm takes away.
        along = (tl.sum(grad_even * even + grad_odd * odd, axis=1) / D)[:, None]
        x = _unpaired(scale * (grad_even - even * along), scale * (grad_odd - odd * along), BLOCK, D_PAD)
        at = ((row * tokens + t[:, None]) * heads + head) * D + d[None, :]
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)
    if NEED_NORM:
        half = tl.arange(0, D_PAD // 2)
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * heads + head
        tl.store(norm_sums_ptr + program * D + 2 * half, norm_even_sum, mask=half < D // 2)
        tl.store(norm_sums_ptr + program * D + 2 * half + 1, norm_odd_sum, mask=half < D // 2)


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    grad_ptr,  # [B, T, H, D] by its strides; the others as in the forward
    image_ptr,
    image_low_ptr,
    image_up_ptr,
    image_norm_ptr,
    text_ptr,
    text_low_ptr,
    text_up_ptr,
    text_norm_ptr,
    image_table_ptr,
    text_table_ptr,
    grad_image_ptr,  # [B, P, E] contiguous
    grad_text_ptr,
    norm_sums_ptr,  # [rows / ROWS, tiles, H, D] float32, for each program what it adds to its stream's norm
    image_tokens, image_row, image_token, image_low_row, image_low_token,
    text_tokens, text_row, text_token, text_low_row, text_low_token,
    grad_row, grad_token, grad_head,
    B, heads, eps,
    IMAGE_R: tl.constexpr, IMAGE_R_PAD: tl.constexpr, TEXT_R: tl.constexpr, TEXT_R_PAD: tl.constexpr,
    NEED_NORM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DOT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    text_tiles = tl.cdiv(text_tokens, BLOCK)
    if tile < text_tiles:
        _backward_stream(
            grad_ptr, text_ptr, text_low_ptr, text_up_ptr, text_norm_ptr, text_table_ptr, grad_text_ptr, norm_sums_ptr,
            tile, 0, text_tokens, B, heads, eps,
            grad_row, grad_token, grad_head, text_row, text_token, text_low_row, text_low_token,
            TEXT_R, TEXT_R_PAD, NEED_NORM, D, D_PAD, DOT, BLOCK, ROWS, STAGES,
        )  # fmt: skip
    else:
        _backward_stream(
            grad_ptr, image_ptr, image_low_ptr, image_up_ptr, image_norm_ptr, image_table_ptr,
            grad_image_ptr, norm_sums_ptr,
            tile - text_tiles, text_tokens, image_tokens, B, heads, eps,
            grad_row, grad_token, grad_head, image_row, image_token, image_low_row, image_low_token,
            IMAGE_R, IMAGE_R_PAD, NEED_NORM, D, D_PAD, DOT, BLOCK, ROWS, STAGES,
        )  # fmt: skip
