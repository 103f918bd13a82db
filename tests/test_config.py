"""Settings: each rule names field, rule and value."""

import pytest

import mprollout as mp
from mprollout.ring import plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mp.SamplingConfig(group_size=0), r"SamplingConfig.group_size must be an integer >= 1; got 0"),
        (lambda: mp.SamplingConfig(group_size="8"), r"group_size: Expected `int`, got `str`; got '8'"),
        (lambda: mp.SamplingConfig(temperature=-1), r"temperature must be >= 0"),
        (lambda: mp.GateConfig(max_lag=1), r"max_lag needs groups_per_update"),
        (lambda: mp.GateConfig(max_live_groups=0), r"max_live_groups must be an integer >= 1 or None; got 0"),
        (mp.SourceConfig, r"exactly one of path, rows, reasoning_gym; got none"),
        (lambda: mp.SourceConfig(path="a", rows=[]), r"exactly one of .*got \['path', 'rows'\]"),
        (lambda: mp.RewardConfig("math", timeout_s=0), r"timeout_s must be a finite number of seconds > 0; got 0"),
        (lambda: mp.RewardConfig("math", timeout_s=float("nan")), r"timeout_s"),
        (lambda: mp.WorkerConfig(devices=[]), r"devices must be a list of 1 to 64 entries"),
        (lambda: mp.SimulatedConfig(faults={"explode": 1.0}), r"faults must be of exception, abort, swallow, die"),
    ],
)
def test_a_broken_rule_names_field_rule_and_value(make, message):
    with pytest.raises(mp.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "biased",
    [{"top_p": 0.9}, {"top_k": 1}, {"top_k": 4096}, {"min_p": 0.1}, {"temperature": 0}, {"temperature": 0, "top_k": 5}],
)
def test_sampling_that_biases_logprobs_is_refused_unless_allowed(biased):
    with pytest.raises(mp.BiasedLogprobs, match=next(iter(biased))):
        mp.SamplingConfig(**biased)
    mp.SamplingConfig(**biased, allow_biased_logprobs=True)


@pytest.mark.parametrize("true", [{"top_k": 50}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}, {"presence_penalty": 0.5}])
def test_sampling_whose_true_logprobs_the_engine_returns_is_accepted(true):
    assert mp.SamplingConfig(**true).biased == []


def test_a_row_may_bring_settings_of_its_own_and_none_that_the_ring_or_the_trainer_rely_on():
    base = mp.SamplingConfig(group_size=4, max_new_tokens=64, temperature=0.8)
    row = base.of_row({"max_new_tokens": 16, "stop": ["\n"], "top_k": 5})
    assert (row.max_new_tokens, row.stop, row.top_k, row.temperature, row.group_size) == (16, ["\n"], 5, 0.8, 4)
    assert base.of_row({}) is base
    for wrong, complaint in (
        (
            {"max_new_tokens": 65},
            "max_new_tokens=65 is over SamplingConfig.max_new_tokens=64, for which the ring was planned",
        ),
        ({"group_size": 2}, "group_size: no setting that a row can have"),
        ({"allow_biased_logprobs": True, "top_q": 1}, "allow_biased_logprobs, top_q: no setting"),
        ({"temperature": "hot"}, "temperature: Expected `float`, got `str`"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
    ):
        with pytest.raises(mp.ConfigError, match=complaint):
            base.of_row(wrong)
    with pytest.raises(mp.BiasedLogprobs, match=r"top_p=0\.9"):
        base.of_row({"top_p": 0.9})
    greedy = mp.SamplingConfig(allow_biased_logprobs=True).of_row({"temperature": 0})
    assert greedy.temperature == 0


def test_a_partial_rollout_needs_updates_that_abort():
    with pytest.raises(
        mp.ConfigError, match="partial_rollout needs pause=\"abort\", else no update aborts; got 'retract'"
    ):
        mp.WeightsConfig(partial_rollout=True)
    with pytest.raises(mp.ConfigError, match="mask_off_policy needs partial_rollout=True"):
        mp.WeightsConfig(pause="abort", mask_off_policy=True)


def make(**parts):
    return mp.EngineConfig(
        source=mp.SourceConfig(path="-", max_prompt_tokens=100),
        generator=mp.SimulatedConfig(),
        reward=mp.RewardConfig("exact"),
        **parts,
    )


def test_the_plan_holds_worst_case_groups_for_whatever_one_worker_may_keep():
    strict = plan(make(gate=mp.GateConfig(groups_per_update=8, max_lag=1), workers=mp.WorkerConfig(devices=[0, 1])))
    assert strict.max_live_groups == strict.entries == 16 and strict.cells == 16
    # In ticket order one worker may keep all 16 live groups and 8 leased ones, with holes between them.
    assert strict.arena_bytes >= 2 * (16 + 8) * strict.max_group_bytes


def test_sizes_that_could_not_deliver_are_refused_with_the_numbers():
    with pytest.raises(
        mp.ConfigError, match=r"arena_bytes=8,192 must hold at least two groups of max_group_bytes=[\d,]+"
    ):
        plan(make(ring=mp.RingConfig(arena_bytes=8192)))
    with pytest.raises(mp.ConfigError, match="two batches of groups_per_update=64"):
        plan(
            make(
                ring=mp.RingConfig(arena_bytes=10**6, max_group_bytes=50_000), gate=mp.GateConfig(groups_per_update=64)
            )
        )


def test_a_config_survives_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        """
        seed = 7
        [source]
        path = "prompts.jsonl"
        [generator]
        backend = "simulated"
        mean_tokens = 9.0
        [reward]
        function = "exact"
        [gate]
        groups_per_update = 8
        max_lag = 1
        """
    )
    loaded = mp.EngineConfig.from_toml(path)
    assert loaded.seed == 7 and isinstance(loaded.generator, mp.SimulatedConfig) and loaded.gate.max_lag == 1
    path.write_text(path.read_text().replace("max_lag", "max_lagg"))
    with pytest.raises(mp.ConfigError, match=r"unknown field `max_lagg`.*gate"):
        mp.EngineConfig.from_toml(path)
