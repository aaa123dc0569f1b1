"""The pieces of an algorithm as flags, by the names of their classes."""

import dataclasses
import json

import pytest
from commands import command

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore, KLInReward, Whitened
from jaxrl_llm.algorithms.kl import K1, K3, AdaptiveEntropy
from jaxrl_llm.algorithms.loss import OPTIONAL, PIECES
from jaxrl_llm.algorithms.ratios import OffPolicySequenceMask, Sequence, TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean
from jaxrl_llm.algorithms.surrogates import CISPO, PPOClip, Surrogate, TopEntropy
from jaxrl_llm.cli.flags import parse_flags
from jaxrl_llm.cli.pieces import ALGORITHM, CONTROLLER, piece_classes
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rules import Rules, Stalls

pytestmark = pytest.mark.filterwarnings("ignore:get_parser")
SMOKE = configs.load_config("smoke")[1]
NO_KL = {"kl": None, "kl_coef": 0.0}


def given(line, recipe="grpo"):
    """The recipe after the flags of a line; ``.x`` is short for ``--recipe.algorithm.x``."""
    flags = [f"--{ALGORITHM}{word}" if word.startswith(".") else word for word in line.split()]
    run = configs.with_recipe(SMOKE, recipe)
    return parse_flags(configs.Run, flags, "train", "", run).recipe


@pytest.mark.parametrize(("recipe", "line", "changed"), [
    ("grpo", ".surrogate PPOClip", {}),
    ("dapo", ".surrogate ppo_clip .surrogate.low 0.1", {"surrogate": PPOClip(0.1, 0.28)}),
    ("grpo", ".surrogate=CISPO .surrogate.ratio_max 4", {"surrogate": CISPO(4.0)}),
    ("grpo", ".surrogate SAPO .surrogate CISPO", {"surrogate": CISPO()}),
    ("dapo", ".kl k3 .kl.clip 10 .kl_coef 0.01", {"kl": K3(10.0), "kl_coef": 0.01}),
    ("dapo", ".kl K1 .kl_in reward .kl_coef 0.1",
     {"advantage": KLInReward(GroupZScore(), K1(), 0.1), "kl": K1(), "kl_coef": 0.1, "kl_in": "reward"}),
    ("grpo", ".kl None .kl_coef 0", NO_KL),
    ("dapo", ".ratio Sequence .reduce sequence-mean", {"ratio": Sequence(), "reduce": SequenceMean()}),
    ("grpo", ".reduce ConstantLength .reduce.length 9", {"reduce": ConstantLength(9)}),
    ("grpo", ".advantage GroupMean", {"advantage": GroupMean()}),
    ("reinforce_pp", ".advantage.baseline group", {"advantage": KLInReward(Whitened("group"), K1(), 0.001)}),
    ("dapo", ".correction TruncatedIS .correction.cap 3", {"correction": TruncatedIS(3.0)}),
    ("dapo", ".sequence_filter OffPolicySequenceMask", {"sequence_filter": OffPolicySequenceMask()}),
    ("dapo", ".token_filter TopEntropy .token_filter.share 0.5", {"token_filter": TopEntropy(0.5)}),
])  # fmt: skip
def test_a_piece_has_the_class_that_is_named_and_the_numbers_of_its_flags(recipe, line, changed):
    before = configs.with_recipe(SMOKE, recipe).recipe
    assert given(line, recipe) == dataclasses.replace(
        before, algorithm=dataclasses.replace(before.algorithm, **changed)
    )


def test_a_controller_is_one_too():
    assert given("--recipe.controller adaptive_entropy --recipe.controller.target 0.3").controller == AdaptiveEntropy(
        0.3
    )
    assert given("--recipe.controller None").controller is None


@pytest.mark.slow(but=("grpo", "ppo", "top_entropy"))
@pytest.mark.parametrize("name", RECIPES)
def test_without_such_a_flag_nothing_changes(name):
    assert given("", name) == RECIPES[name]


def test_every_piece_of_every_algorithm_can_be_named():
    known = piece_classes()
    assert known.keys() == {CONTROLLER, *(f"{ALGORITHM}.{piece}" for piece in PIECES)}
    for algorithm in PRESETS.values():
        for name in PIECES:
            piece = getattr(algorithm, name)
            piece = piece.estimator if isinstance(piece, KLInReward) else piece
            assert (None if piece is None else type(piece)) in known[f"{ALGORITHM}.{name}"].values()
    assert {name for name, kinds in known.items() if "None" in kinds} == {
        CONTROLLER, *(f"{ALGORITHM}.{name}" for name in OPTIONAL)
    }  # fmt: skip


@pytest.mark.parametrize(("line", "words"), [
    (".surrogate klip", "--recipe.algorithm.surrogate: expected one of "),
    (".surrogate None", "got 'None'"),
    (".reduce", "--recipe.algorithm.reduce needs a value"),
    (".kl K4", "--recipe.algorithm.kl: expected one of K1, K2, K3, K3Plus, UnbiasedK3, None, got 'K4'"),
    (".kl None", "recipe.algorithm.kl_coef=0.04 needs an estimator: set kl"),
    (".ratio Sequence .reduce TokenMean", "a sequence ratio needs SequenceMean"),
    (".surrogate CISPO .surrogate.low 0.2", "no option --recipe.algorithm.surrogate.low"),
    ("--surrogate CISPO", "did you mean --recipe.algorithm.surrogate?"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(line, words):
    with pytest.raises(InputError) as refusal:
        given(line)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_class_of_ones_own_is_named_alike():
    @dataclasses.dataclass(frozen=True)
    class Halved(Surrogate):
        share: float

        def __call__(self, at):
            return -self.share * at.advantages

    with pytest.raises(InputError, match="Halved has no default share: set it in the configuration"):
        given(".surrogate halved")


@pytest.mark.slow
def test_help_shows_them_and_a_resumed_run_compares_them(tmp_path):
    shown = command("train", "smoke", "--help", "recipe", folder=tmp_path).out
    assert "--recipe.algorithm.kl {K1,K2,K3,K3Plus,UnbiasedK3,None}" in shown and "(default: K3)" in shown
    assert "--recipe.algorithm.surrogate {CISPO," in shown and "--recipe.controller {" in shown
    flags = ("--recipe.algorithm.surrogate", "CISPO", "--steps", "1", "--quiet")
    assert command("train", "smoke", *flags, folder=tmp_path).code == 0
    saved = json.loads((tmp_path / "runs/smoke/config.json").read_text())["recipe"]["algorithm"]["surrogate"]
    assert saved == {"type": "jaxrl_llm.algorithms.surrogates:CISPO", "ratio_max": 5.0, "ratio_min": 0.0}
    other = command("train", "smoke", "--steps", "2", "--quiet", folder=tmp_path)
    assert other.code == 2 and "was begun with other settings (recipe.algorithm.surrogate" in other.err
    assert command("train", "smoke", *flags, "--steps", "2", folder=tmp_path).code == 0


UNTILS = {
    "--rules.until None": None,
    "--rules.until none": None,
    "--rules.until Stalls --rules.until.evaluations 5": Stalls(5, "kl"),
    "--rules.until.evaluations 5": Stalls(5, "kl"),
}


@pytest.mark.parametrize("line", UNTILS)
def test_the_condition_that_ends_a_run_is_taken_away_or_changed(line):
    run = dataclasses.replace(SMOKE, rules=Rules(until=Stalls(2, "kl")))
    assert parse_flags(configs.Run, line.split(), "train smoke", "", run).rules.until == UNTILS[line]
    with pytest.raises(InputError, match=r"--rules\.until Reaches has no default metric: set it in the configuration"):
        parse_flags(configs.Run, ["--rules.until", "Reaches"], "train smoke", "", run)
