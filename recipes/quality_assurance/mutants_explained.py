"""Why a mutant survives: a part of the function's name, a part of the changed lines, the reason."""

EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("", 'float("-INF")', "the same number: float() reads either case"),
    ("naive_feature_maps.taylor_weights", "BHID,BHJD->BHIJ", "the same sum: the letters of einsum are names"),
    ("naive_scatterbrain.scatterbrain_attention", "transpose(-1, +2)", "axis 2 of four is axis -2"),
    (
        "windowed.dense_windowed_weights",
        "query_features, None",
        "the place of the first token is for maps with positions, which windows refuse",
    ),
    ("CosformerFeatureMap.__init__", "XXcosformer needs max_length", "more words around a message"),
    (
        "RandomFeatureOptions.draw",
        "- LAYER_SEED_STRIDE",
        "other rows of the same kind; which layer draws which rows is not promised, and they are saved with the model",
    ),
    (
        "FavorPlusFeatureMap._rows",
        "and False else self.num_features",
        "noticed: the process dies, as a kernel writes beyond a tensor; since then kernels refuse such a formula",
    ),
    (
        "fused.WindowedCall.needs_grad",
        "_needs_grad(self, )",
        "decides over a gradient of the mixture alone through a carried state; noticed since, by a test of just that",
    ),
)
