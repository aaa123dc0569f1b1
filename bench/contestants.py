"""What a contestant's process does, ours or another library's: ``python bench/contestants.py ROLE``, for ``peers.py``.

The work comes as a line of JSON on standard input, answers go out as lines on standard output, and what libraries print
goes to standard error. Only Python's own library is imported at the top: a peer's environment has nothing of ours.

``work_*`` serves rollouts, updates or steps (``serve``): the work has ``what`` (rollout, update, or step: both),
``model`` (a Hugging Face directory), ``prompts``, ``limits`` (the length of each completion), ``completions`` and
``advantages`` to learn from, ``learning_rate``, ``slots``, ``prompt``, ``completion``, ``chunk``, ``group``, ``mode``.

``learn_*`` and ``distil_*`` train whole runs: the work has ``model``, ``train`` and ``test`` (problems, each with
``prompt``, the text up to where the answer begins, and ``answer``), ``prompts`` and ``group`` of a step, ``completion``
and ``prompt`` (tokens at most), ``temperature``, ``learning_rate``, ``clip_norm``, ``clip`` (lower and upper),
``microbatch`` (rows of one pass), ``steps``, ``seed``, ``config`` (ours alone), ``teacher`` and ``beta`` (of a
distillation), ``turns`` of an episode (0: one answer; else ``train`` has chat messages and the environment's columns,
and nothing is tested) and ``began`` (the clock when the process was started). After each step a line goes out.

``loss_*`` compute losses on given log-probabilities, for ``losses.py``.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MICROBATCH = 16
"""Rows of one forward and backward pass of the peers."""
CHECKED_UPDATES = 2
"""The second shows whether the first changed the weights in the same way."""
Work = dict[str, Any]


class Contestant(NamedTuple):
    """A library that is ready to work.

    Attributes:
      greedy: () -> the first prompt's completion at temperature 0, as long as the longest one.
      generate: (seed) -> completions, each with at least its limit's tokens.
      update: (completions) -> (loss, the gradient's norm): one optimiser step of GRPO by all of them.
    """

    greedy: Callable[[], Sequence[int]]
    generate: Callable[[int], list[Sequence[int]]]
    update: Callable[[list[list[int]]], tuple[float, float]] | None


def forget_peak() -> None:
    """Begin the count of the largest memory anew, where the system lets us; if not, it holds loading and compiling
    too.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_mb() -> int:
    """The largest memory of this process since ``forget_peak``."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def done(contestant: Contestant, work: Work, seed: int) -> Work:
    """What the work gives: completions of the right lengths where it samples. A step learns from what it sampled."""
    completions = work["completions"]
    if work["what"] != "update":
        pairs = zip(contestant.generate(seed), work["limits"], strict=True)
        completions = [[int(token) for token in tokens[:limit]] for tokens, limit in pairs]
    if work["what"] != "rollout":
        contestant.update(completions)
    return {} if work["what"] == "update" else {"completions": completions}


def timed(contestant: Contestant, work: Work, seed: int) -> Work:
    """The work done once: its seconds, from Python's lists of tokens to such lists or a finished optimiser step."""
    forget_peak()
    began = time.perf_counter()
    found = done(contestant, work, seed)
    return {"seconds": time.perf_counter() - began, "peak_mb": peak_mb()} | found


def serve(make: Callable[[Work], Contestant], work: Work, out: Any) -> None:
    """Check, do all of the work once, answer; then time it for each further line, until standard input ends.

    What is checked: the first prompt decoded greedily, and updates by the completions given.
    """
    contestant, found = make(work), {}
    if work["what"] != "update":
        found["greedy"] = [int(token) for token in contestant.greedy()]
        found |= done(contestant, work | {"what": "rollout"}, 0)
    if work["what"] != "rollout":
        found["updates"] = [contestant.update(work["completions"]) for _ in range(CHECKED_UPDATES)]
    print(json.dumps(found), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(contestant, work, json.loads(line)["seed"])), file=out, flush=True)


def batches(work: Work) -> Iterator[tuple[list[list[int]], list[int]]]:
    """The requests in order, ``slots`` at a time, for samplers that keep a batch until its longest row ends."""
    for start in range(0, len(work["prompts"]), work["slots"]):
        rows = slice(start, start + work["slots"])
        yield work["prompts"][rows], work["limits"][rows]


def padded(rows: list[list[int]], width: int, filler: float) -> list[list[Any]]:
    """The rows, filled on the right."""
    return [[*row, *[filler] * (width - len(row))] for row in rows]


def reward_of(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    """1 where the last number of a text is the reference's, else 0; by a file of ours that needs no other library."""
    place = importlib.util.spec_from_file_location("answers", ROOT / "jaxrl_llm" / "tasks" / "extract.py")
    cut = importlib.util.module_from_spec(place)
    place.loader.exec_module(cut)
    found = [cut.parse_number(cut.extract(text, "last_number") or "") for text in texts]
    right = [cut.parse_number(str(reference)) for reference in references]
    return [float(value is not None and value == reference) for value, reference in zip(found, right, strict=True)]


def batches_of(problems: Sequence[Work], size: int, seed: int) -> Iterator[list[Work]]:
    """``size`` problems at a time, in a new order in each epoch; what is left of one begins the next batch."""
    order = random.Random(seed)
    waiting: list[Work] = []
    while True:
        while len(waiting) < size:
            waiting += order.sample(list(problems), len(problems))
        yield waiting[:size]
        waiting = waiting[size:]


class Calculator:
    """The environment of every contestant, after TRL's interface: one tool; the reward is 1 if it was called with the
    row's two numbers.

    Attributes:
      made: calls in all episodes of the process.
    """

    made = 0

    def reset(self, a: int, b: int, **row: Any) -> None:
        """Begin."""
        self._asked, self._reward = sorted((a, b)), 0.0

    def multiply(self, a: int, b: int) -> str:
        """Multiply two integers.

        Args:
          a: the first.
          b: the second.
        """
        Calculator.made += 1
        if sorted((a, b)) == self._asked:
            self._reward = 1.0
        return str(a * b)

    def get_reward(self) -> float:
        """Return the reward of the episode."""
        return self._reward


class Told:
    """Keeps the clock, and tells of each step: ``step``, ``seconds`` since the start without those of evaluations,
    ``accuracy`` on ``test`` by greedy answers, ``calls`` of the environment's tool so far.

    Args:
      work: as it came.
      out: where lines go.
      answer: the greedy answers to prompts, of the policy as it is.
      clock: seconds, as those of ``began``.
    """

    def __init__(
        self,
        work: Work,
        out: Any,
        answer: Callable[[list[str]], list[str]],
        clock: Callable[[], float] = time.time,
    ):
        self._work, self._out, self._answer, self._clock = work, out, answer, clock
        self._tested = 0.0

    def step(self, number: int) -> None:
        """Step ``number`` has learned."""
        began, tested = self._clock(), self._work["test"]
        texts = self._answer([problem["prompt"] for problem in tested]) if tested else []
        right = reward_of(texts, [problem["answer"] for problem in tested])
        line = {"step": number, "seconds": began - self._work["began"] - self._tested, "calls": Calculator.made}
        print(json.dumps(line | {"accuracy": sum(right) / max(len(right), 1)}), file=self._out, flush=True)
        self._tested += self._clock() - began


def work_ours(work: Work) -> Contestant:
    """One engine, by the calls that the trainer makes, and a state where there is anything to learn."""
    from bench.speed import ADAM, LEARNER, samples_of, set_up, updated
    from jaxrl_llm.models import load_pretrained
    from jaxrl_llm.rollout import Engine, Sampling

    model, _ = load_pretrained(work["model"])
    learner = dataclasses.replace(LEARNER, optimiser=dataclasses.replace(ADAM, learning_rate=work["learning_rate"]))
    learns = work["what"] != "rollout"
    state, setup = set_up(model, learner, work["prompt"], work["completion"]) if learns else (None, None)
    mesh = {"mesh": setup.forward.mesh} if learns else {}
    engine = Engine(
        model, work["slots"], work["prompt"] + work["completion"], work["chunk"], group=work["group"], **mesh
    )
    holder = [state]

    def weights() -> Any:
        return holder[0].policy.params if learns else model

    def greedy() -> Sequence[int]:
        rule = Sampling(temperature=0.0, max_new_tokens=work["completion"])
        return engine.generate(weights(), work["prompts"][:1], [0], rule)[0].tokens

    def generate(seed: int) -> list[Sequence[int]]:
        engine.start(Sampling(max_new_tokens=work["completion"]))
        count = len(work["prompts"])
        handles = engine.submit(work["prompts"], range(seed * count, (seed + 1) * count), work["limits"])
        while engine.busy:
            engine.step(weights())
        finished = dict(engine.collect())
        return [finished[handle].tokens for handle in handles]

    def update(completions: list[list[int]]) -> tuple[float, float]:
        groups = samples_of(work["prompts"], completions, work["advantages"], work["group"])
        holder[0], metrics = updated(holder[0], groups, setup)
        return metrics["loss"], metrics["grad_norm"]

    return Contestant(greedy, generate, update if learns else None)


def learn_ours(asked: Work, out: Any) -> None:
    """jaxrl_llm's own run, as ``jaxrl-llm train`` makes it, tested after every step."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.environments import Limits
    from jaxrl_llm.learner import Compute, Learner, Optimiser
    from jaxrl_llm.recipes import GRPO
    from jaxrl_llm.rollout import EngineOptions, Rollout
    from jaxrl_llm.tasks import Task
    from jaxrl_llm.trainer.launch import train

    def tell(metrics: Path) -> None:
        tested, read = 0.0, 0
        while True:
            lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
            now = time.time()
            for row in map(json.loads, lines[read:]):
                tested += row.get("time/evaluation_s", 0.0)
                accuracy = next((value for name, value in row.items() if name.endswith("/pass@1")), 0.0)
                line = {"step": row["step"], "seconds": now - asked["began"] - tested, "accuracy": accuracy}
                print(json.dumps(line | {"calls": Calculator.made}), file=out, flush=True)
            read = len(lines)
            time.sleep(0.02)

    if asked["turns"]:
        recipe = dataclasses.replace(GRPO, algorithm=dataclasses.replace(GRPO.algorithm, kl=None, kl_coef=0.0))
        run = configs.Run(
            model=asked["model"],
            task=Task(asked["train"], environment=Calculator, verifier="none", name="products"),
            recipe=recipe,
            scoring=configs.Scoring(rewards=()),
            rollout=Rollout(
                prompts=asked["prompts"], group=asked["group"], max_prompt_tokens=asked["prompt"],
                max_new_tokens=asked["completion"], temperature=asked["temperature"],
                engine=EngineOptions(slots=asked["prompts"] * asked["group"]), episode=Limits(max_turns=asked["turns"]),
            ),
            learner=Learner(optimiser=Optimiser(learning_rate=asked["learning_rate"]), compute=Compute(remat="none")),
        )  # fmt: skip
    else:
        run = configs.find_config(asked["config"]).run
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(
            run,
            steps=asked["steps"],
            seed=asked["seed"],
            evaluation=dataclasses.replace(run.evaluation, every=int(not asked["turns"])),
            output=dataclasses.replace(run.output, run_dir=folder + "/run", checkpoint_every=asked["steps"]),
        )
        threading.Thread(target=tell, args=(Path(folder) / "run" / "metrics.jsonl",), daemon=True).start()
        train(run)
        time.sleep(0.5)  # for the last line


def trl_settings(asked: Work, rows: int, **more: Any) -> Work:
    """What all of TRL's trainers are given on a CPU: the whole vocabulary, nothing recomputed for less memory."""
    size = math.gcd(rows, asked.get("microbatch", MICROBATCH))
    return {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "report_to": [],
        "gradient_checkpointing": False, "per_device_train_batch_size": size, "weight_decay": 0.0,
        "gradient_accumulation_steps": rows // size, "learning_rate": asked["learning_rate"],
        "max_completion_length": asked["completion"], "top_p": 1.0, "top_k": 0,
        "temperature": asked.get("temperature", 1.0),
    } | more  # fmt: skip


def work_trl(work: Work) -> Contestant:
    """TRL without a server: GRPOTrainer's own call of transformers' ``generate``, or continuous batching; and its loss.

    ``mode`` generate: the trainer is asked for completions by the method that it uses in training; a batch runs until
    its longest row is done. ``mode`` batching: the manager behind ``generate_batch``, which TRL calls with one length
    for all, is given each request with its own. Both learn by the trainer's own loss and optimiser. Liger's kernels
    need a GPU; the log-probabilities without whole logits are in that loss always.
    """
    import datasets
    import tokenizers
    import torch
    import transformers
    from transformers.generation import ContinuousBatchingConfig
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    pad = model.config.vocab_size  # end and padding are ids that the model cannot sample
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": pad, "<eos>": pad + 1}, "<pad>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    rows = datasets.Dataset.from_dict({"prompt": ["<eos>"] * work["slots"]})
    loss = {"num_generations": work["group"], "loss_type": "grpo", "beta": 0.0, "epsilon": 0.2}
    config = GRPOConfig(**trl_settings(work, work["slots"], **loss))
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, rows, processing_class=words
    )
    parts = trainer.args.gradient_accumulation_steps
    trainer.current_gradient_accumulation_steps = parts

    def update(completions: list[list[int]]) -> tuple[float, float]:
        """By rows as wide as the longest completion, as the trainer batches them."""
        model.train()
        width, total = max(map(len, completions)), 0.0
        prompts = torch.tensor(work["prompts"])
        mask = torch.tensor(padded([[1] * len(row) for row in completions], width, 0))
        batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_mask": mask}
        batch |= {"completion_ids": torch.tensor(padded(completions, width, 0))}
        batch |= {"advantages": torch.tensor(work["advantages"])}
        for part in torch.arange(len(mask)).chunk(parts):
            loss = trainer.compute_loss(model, {name: values[part] for name, values in batch.items()})
            trainer.accelerator.backward(loss)
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        optimiser.step()
        optimiser.zero_grad()
        return total, norm

    def in_batches() -> tuple[Callable, Callable]:
        """With the trainer's defaults: dynamic cache, SDPA, no compilation."""

        def greedy() -> Sequence[int]:
            prompt = torch.tensor(work["prompts"][:1])
            rule = transformers.GenerationConfig(max_new_tokens=work["completion"], do_sample=False, pad_token_id=pad)
            model.eval()
            with torch.no_grad():
                return model.generate(prompt, generation_config=rule)[0, prompt.shape[1] :].tolist()

        def generate(seed: int) -> list[Sequence[int]]:
            transformers.set_seed(seed)
            tokens = []
            for prompts, limits in batches(work):
                trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = max(limits)
                tokens += trainer._generate_single_turn(prompts, None, {}, 1)[0]
            return tokens

        return greedy, generate

    def continuously() -> tuple[Callable, Callable]:
        """A manager for each call, as ``generate_batch`` makes it; as many requests at a time as there are slots.

        Twice the pages that these need: the scheduler starts no request where few are free.
        """
        pages = -(-(work["prompt"] + work["completion"]) // ContinuousBatchingConfig.page_size)
        room = ContinuousBatchingConfig(max_requests_per_batch=work["slots"], num_blocks=2 * pages * work["slots"])

        def complete(prompts: list[list[int]], limits: list[int], sample: bool) -> list[Sequence[int]]:
            rule = transformers.GenerationConfig(
                do_sample=sample, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=work["completion"],
                eos_token_id=-1, pad_token_id=pad,
            )  # fmt: skip
            finished = {}
            with model.continuous_batching_context_manager(rule, continuous_batching_config=room) as manager:
                pairs = zip(prompts, limits, strict=True)
                names = [manager.add_request(prompt, max_new_tokens=limit) for prompt, limit in pairs]
                while len(finished) < len(names) and manager.is_running():
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        finished[result.request_id] = result.generated_tokens
            return [finished[name] for name in names]

        def generate(seed: int) -> list[Sequence[int]]:
            transformers.set_seed(seed)
            return complete(work["prompts"], work["limits"], sample=True)

        return lambda: complete(work["prompts"][:1], [work["completion"]], sample=False)[0], generate

    learns = work["what"] != "rollout"
    optimiser = trainer.create_optimizer() if learns else None
    return Contestant(*(in_batches() if work["mode"] == "generate" else continuously()), update if learns else None)


def learn_trl(asked: Work, out: Any) -> None:
    """TRL's GRPOTrainer as its users run it on a CPU, with the loss of DAPO; or its DistillationTrainer, on-policy."""
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(os.cpu_count() or 1)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model, rows = load(asked["model"]), asked["prompts"] * asked["group"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"], padding_side="left")
    settings = trl_settings(
        asked, rows, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        max_grad_norm=asked["clip_norm"], max_steps=asked["steps"], seed=asked["seed"],
    )  # fmt: skip
    if "teacher" in asked:
        drawn = batches_of(asked["train"], asked["prompts"], asked["seed"])
        steps = [next(drawn) for _ in range(asked["steps"])]
        data = [{"prompt": one["prompt"]} for batch in steps for one in batch for _ in range(asked["group"])]
        config = trl.DistillationConfig(**settings, beta=asked["beta"], shuffle_dataset=False)
        data = datasets.Dataset.from_list(data)
        trainer = trl.DistillationTrainer(model, load(asked["teacher"]), config, data, processing_class=tokenizer)
    else:
        low, high = asked["clip"]
        config = trl.GRPOConfig(
            **settings, num_generations=asked["group"], loss_type="dapo", beta=0.0, epsilon=low, epsilon_high=high,
            scale_rewards="group", max_tool_calling_iterations=asked["turns"] - 1 if asked["turns"] else None,
        )  # fmt: skip

        def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            return reward_of(completions, answer)

        own = {"environment_factory": Calculator} if asked["turns"] else {"reward_funcs": reward}
        data = datasets.Dataset.from_list(asked["train"])
        trainer = trl.GRPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer, **own)

    def answer(prompts: list[str]) -> list[str]:
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        rule = transformers.GenerationConfig(
            max_new_tokens=asked["completion"], do_sample=False,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        trainer.model.eval()
        with torch.no_grad():
            tokens = trainer.model.generate(**batch, generation_config=rule)[:, batch["input_ids"].shape[1] :]
        trainer.model.train()
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)

    told = Told(asked, out, answer)

    class AfterEachStep(transformers.TrainerCallback):
        """Tells of it."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """After the optimiser."""
            told.step(state.global_step)

    trainer.add_callback(AfterEachStep())
    trainer.train()


def load_tunix(directory: str) -> Any:
    """Tunix's Qwen3 or Llama with the directory's weights in float32, on one device."""
    import jax.numpy as jnp

    config = json.loads((Path(directory) / "config.json").read_text())
    heads = config["num_attention_heads"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    shape = {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": theta,
    }
    tied = config["tie_word_embeddings"]
    if config["model_type"] == "qwen3":
        from tunix.models.qwen3 import model, params

        of = model.ModelConfig(**shape, use_tied_embedding=tied)
    else:
        from tunix.models.llama3 import model, params

        of = model.ModelConfig(**shape, weight_tying=tied)
    # Both families rotate by a base of 1e6 whatever the config says; this makes them compute the model that is named.
    model.apply_rope = functools.partial(model.apply_rope, rope_theta=theta)
    return params.create_model_from_safe_tensors(directory, of, dtype=jnp.float32)


class Ids:
    """A tokenizer for Tunix that takes and gives token ids; no token pads or ends."""

    encode = staticmethod(lambda ids: ids)
    decode = staticmethod(lambda ids: "")  # a text would cost time
    bos_id = staticmethod(lambda: 0)  # nothing is put before a prompt
    eos_id = staticmethod(lambda: -2)
    pad_id = staticmethod(lambda: -1)


def work_tunix(work: Work) -> Contestant:
    """Tunix: its own sampler, which runs in the trainer's process ("vanilla"), and the step of its GRPO learner.

    A cache of exactly the longest request; a batch is sampled until its longest row is done. Its packing of rows needs
    the attention kernel for TPUs: rows are as wide as the longest completion may be, as its learner has them.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.rl import function_registry
    from tunix.rl.common import TrainExample
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    model, pad = load_tunix(work["model"]), Ids.pad_id()
    of = model.config
    cache = CacheConfig(work["prompt"] + work["completion"], of.num_layers, of.num_kv_heads, of.head_dim)
    sampler = Sampler(model, Ids(), cache)

    def greedy() -> Sequence[int]:
        return sampler(work["prompts"][:1], work["completion"], work["prompt"]).tokens[0]

    def generate(seed: int) -> list[Sequence[int]]:
        sampler.transformer_state = nnx.variables(model)
        tokens = []
        for index, (prompts, limits) in enumerate(batches(work)):
            given = {"temperature": 1.0, "top_p": 1.0, "seed": 1000 * seed + index}
            tokens += sampler(prompts, max(limits), work["prompt"], **given).tokens
        return tokens

    def learner() -> Callable[[list[list[int]]], tuple[float, float]]:
        """The trainer as its GRPO learner sets it up, for an optimiser step of some passes; the gradient's norm is
        noted.
        """
        count = len(work["prompts"])
        size = math.gcd(count, MICROBATCH)
        algorithm = GRPOConfig(num_generations=work["group"], beta=0.0, epsilon=0.2)
        algorithm.temperature = 1.0
        adam = optax.adamw(work["learning_rate"], weight_decay=0.0)
        adam = optax.chain(optax.snapshot("norm", optax.tree.norm), adam)
        config = TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=count // size)
        trainer = Trainer(model, adam, config, lambda: {})
        loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
        given = functools.partial(loss, algo_config=algorithm, pad_id=pad, eos_id=Ids.eos_id())
        trainer.with_loss_fn(lambda model, train_example: given(model, train_example), has_aux=True)
        trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
        step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        prompts, advantages = jnp.asarray(work["prompts"], jnp.int32), jnp.asarray(work["advantages"], jnp.float32)

        def update(completions: list[list[int]]) -> tuple[float, float]:
            tokens = jnp.asarray(padded(completions, work["completion"], pad), jnp.int32)
            batch = TrainExample(prompts, prompts != pad, tokens, tokens != pad, advantages, None, None)
            losses = []
            for start in range(0, count, size):
                losses.append(step(jax.tree.map(lambda x, at=start: x[at : at + size], batch))[0])
            jax.block_until_ready(nnx.state(model))
            norm = optax.tree.get(nnx.as_pure(nnx.state(trainer.optimizer)), "norm")
            return float(sum(losses)) / len(losses), float(norm)

        return update

    return Contestant(greedy, generate, None if work["what"] == "rollout" else learner())


def learn_tunix(asked: Work, out: Any) -> None:
    """Tunix's GRPO learner with the loss of DAPO, and its sampler in the trainer's process."""
    import jax
    import numpy as np
    import optax
    import transformers
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    # The policy alone on one device: nothing holds it to a reference.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    optimiser = optax.chain(
        optax.clip_by_global_norm(asked["clip_norm"]), optax.adamw(asked["learning_rate"], weight_decay=0.0)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"])
    # It finds padding by the token, so that this must be none that prompts or answers hold.
    used = ("<|im_start|>", "<|im_end|>")
    tokenizer.pad_token = next(word for word in tokenizer.all_special_tokens if word not in used)

    def rollout(temperature: float, top_p: float | None) -> RolloutConfig:
        return RolloutConfig(
            max_tokens_to_generate=asked["completion"], max_prompt_length=asked["prompt"], temperature=temperature,
            top_p=top_p, top_k=None, kv_cache_size=asked["prompt"] + asked["completion"],
            eos_tokens=[tokenizer.eos_token_id], seed=asked["seed"],
        )  # fmt: skip

    training = RLTrainingConfig(
        actor_optimizer=optimiser, eval_every_n_steps=10**9, max_steps=asked["steps"] + 1,
        mini_batch_size=asked["prompts"], train_micro_batch_size=max(asked["microbatch"] // asked["group"], 1),
        rollout_micro_batch_size=asked["prompts"],
    )  # fmt: skip
    cluster = RLCluster(
        actor=load_tunix(asked["model"]),
        tokenizer=TokenizerAdapter(tokenizer),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
            training_config=training,
            rollout_config={Mode.TRAIN: rollout(asked["temperature"], 1.0), Mode.EVAL: rollout(0.0, None)},
        ),
    )

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return reward_of(completions, answer)

    told = Told(
        asked, out, lambda prompts: cluster.generate(prompts, mode=Mode.EVAL, micro_batch_size=len(prompts)).text
    )

    def batches() -> Iterator[dict[str, Any]]:
        """Asked for the next one when a step has learned and the sampler has its weights."""
        for step, batch in enumerate(batches_of(asked["train"], asked["prompts"], asked["seed"])):
            if step:
                told.step(step)
            if step == asked["steps"]:
                return
            yield {
                "prompts": np.array([problem["prompt"] for problem in batch]),
                "answer": np.array([problem["answer"] for problem in batch]),
            }

    low, high = asked["clip"]
    # Its DAPOConfig is this loss too, but pays for a reference's log-probabilities that nothing reads.
    algorithm = GRPOConfig(num_generations=asked["group"], beta=0.0, epsilon=low, loss_agg_mode="token-mean")
    algorithm.epsilon_high = high
    GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward).train(batches())


def loss_trl(work: Work, out: Any) -> None:
    """TRL's own GRPO losses on given groups and on given log-probabilities; gradients of the weights go to files."""
    import datasets
    import torch
    import transformers
    from safetensors.torch import save_file
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):
        """The trainer, whose log-probabilities are given where ``logp`` is set."""

        logp: torch.Tensor | None = None

        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            if self.logp is None:
                return super()._get_per_token_logps_and_entropies(*args, **named)
            return self.logp, torch.zeros_like(self.logp), None

    folder = Path(work["folder"])
    batch = json.loads((folder / "batch.json").read_text())
    prompts, completions, drawn = batch["prompts"], batch["completions"], work["random"]
    before, after = (max(map(len, rows)) for rows in (prompts, completions))
    mask = torch.tensor(padded([[1] * len(row) for row in completions], after, 0))
    inputs = {
        "prompt_ids": torch.tensor([[0] * (before - len(row)) + row for row in prompts]),
        "prompt_mask": torch.tensor([[0] * (before - len(row)) + [1] * len(row) for row in prompts]),
        "completion_ids": torch.tensor(padded(completions, after, 0)),
        "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]),
        "old_per_token_logps": torch.tensor(padded(batch["old_logp"], after, 0.0)),
        "num_items_in_batch": mask.sum(),
    }
    mask = torch.tensor(drawn["mask"]).int()
    alone = {name: torch.zeros_like(mask) for name in ("prompt_ids", "prompt_mask", "completion_ids")} | {
        "completion_mask": mask, "advantages": torch.tensor(drawn["advantages"]),
        "old_per_token_logps": torch.tensor(drawn["old_logp"]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    losses, on_random = {}, {}
    for name, settings in work["losses"].items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
        rows = len(prompts)
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], beta=0.0, num_generations=rows,
            per_device_train_batch_size=rows, gradient_checkpointing=False, max_completion_length=after,
            temperature=1.0, disable_dropout=True, **settings,
        )  # fmt: skip
        data = datasets.Dataset.from_list([{"prompt": "a"}] * rows)
        trainer = Given(model, lambda texts, **_: [0.0] * len(texts), config, data, processing_class=tokenizer)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        weights = {weight: one.grad.contiguous() for weight, one in trainer.model.named_parameters()}
        save_file(weights, folder / f"{name}_trl.safetensors")
        losses[name] = loss.item()
        trainer.max_completion_length = len(drawn["logp"][0])
        trainer.logp = torch.tensor(drawn["logp"], requires_grad=True)
        loss = trainer._compute_loss(trainer.model, alone)
        loss.backward()
        on_random[name] = {"loss": loss.item(), "gradient": trainer.logp.grad.tolist()}
    versions = {library: version(library) for library in ("trl", "torch", "transformers")}
    print(json.dumps({"losses": losses, "random": on_random, "versions": versions}), file=out, flush=True)


def loss_verl(work: Work, out: Any) -> None:
    """verl's own policy losses on given log-probabilities."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    found, batch = {}, work["random"]
    mask = torch.tensor(batch["mask"]).float()
    advantages = torch.tensor(batch["advantages"])[:, None].expand_as(mask)
    for title, given in work["losses"].items():
        logp, name = torch.tensor(batch["logp"], requires_grad=True), given["name"]
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(name, **given["choice"]), **given["settings"],
        )  # fmt: skip
        old = torch.tensor(batch["old_logp"])
        loss, _ = get_policy_loss_fn(name)(old, logp, advantages, mask, config.loss_agg_mode, config)
        loss.backward()
        found[title] = {"loss": loss.item(), "gradient": logp.grad.tolist()}
    print(json.dumps({"random": found, "versions": {one: version(one) for one in ("verl", "torch")}}), file=out)


def main(role: str) -> None:
    """Do what the first line of standard input says."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.loads(sys.stdin.readline())
    makers = {"work_ours": work_ours, "work_trl": work_trl, "work_tunix": work_tunix}
    if role in makers:
        serve(makers[role], work, out)
        return
    whole = {"learn_ours": learn_ours, "learn_trl": learn_trl, "learn_tunix": learn_tunix}
    whole |= {"loss_trl": loss_trl, "loss_verl": loss_verl}
    whole[role](work, out)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from bench import contestants  # classes that a run names need a module

    contestants.main(sys.argv[1])
