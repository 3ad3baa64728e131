"""Arguments of ConditionalUnet1D that tests draw or share."""

from hypothesis import strategies as st

WIDE = {"down_dims": (64, 128), "diffusion_step_embed_dim": 32, "kernel_size": 5}
# name: (constructor arguments, batch, horizon)
CONFIGS = {
    "film_scale": (
        {"input_dim": 2, "global_cond_dim": 20, "cond_predict_scale": True, **WIDE},
        9,
        16,
    ),
    "film_shift": ({"input_dim": 8, "global_cond_dim": 5, **WIDE}, 70, 8),
    "unconditional": ({"input_dim": 3, **WIDE, "kernel_size": 3}, 1, 4),
    "odd_widths": (
        {
            "input_dim": 5,
            "global_cond_dim": 1,
            "diffusion_step_embed_dim": 10,
            "down_dims": (16, 8, 24),
            "kernel_size": 7,
            "n_groups": 4,
            "cond_predict_scale": True,
        },
        2,
        8,
    ),
    "one_level": ({"input_dim": 1, "diffusion_step_embed_dim": 4, "down_dims": [8]}, 2, 5),
    "clusters": (
        {
            "input_dim": 2,
            "global_cond_dim": 70,
            "diffusion_step_embed_dim": 64,
            "down_dims": (128, 512),
            "cond_predict_scale": True,
        },
        40,
        16,
    ),
    "long": ({"input_dim": 2, **WIDE}, 2, 300),
}


@st.composite
def architectures(draw):
    """Arguments of ConditionalUnet1D over all that the original accepts."""
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    depth = draw(st.integers(1, 4))
    widths = [8 * draw(st.integers(1, 3)) for _ in range(depth)]
    return {
        "input_dim": draw(st.integers(1, 24)),
        "local_cond_dim": draw(st.none() | st.integers(1, 5)),
        "global_cond_dim": draw(st.none() | st.integers(1, 9)),
        "diffusion_step_embed_dim": 2 * draw(st.integers(2, 12)),
        "down_dims": tuple(widths),
        "kernel_size": draw(st.sampled_from([1, 3, 5, 7])),
        "n_groups": groups,
        "cond_predict_scale": draw(st.booleans()),
    }
