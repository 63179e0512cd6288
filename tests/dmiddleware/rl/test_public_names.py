import dmiddleware.rl as rl


def test_the_public_names_are_these():
    assert set(rl.__all__) == {
        "gae", "Advantage", "nstep_return", "NStepReturn", "take_rows",
        "discounted_return", "lambda_return", "explained_variance", "discounted_scan",
        "vtrace", "VTrace",
        "with_nstep_returns", "with_advantages", "with_returns_to_go", "episode_cuts",
        "categorical_target", "clipped_share", "quantile_huber_loss", "taken_rows",
        "td_target", "q_target", "td_loss", "ensemble_td_loss", "weighted_mean", "TDLoss",
        "sequence_priority", "soft_value", "rescale_value", "unscale_value",
        "ppo_policy_loss", "PPOPolicyLoss", "ppo_value_loss",
        "bc_loss", "bc_hits",
        "Schedule", "Counters", "epsilon_greedy",
        "Distribution", "Categorical", "MultiCategorical", "Bernoulli", "Gaussian", "TanhGaussian",
        "Hybrid", "mask_logit",
        "RunningMeanStd", "RewardNormalizer",
    }  # fmt: skip
    assert all(hasattr(rl, name) for name in rl.__all__)
