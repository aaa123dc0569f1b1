"""A run that trains an adapter, through the command line: broken off, gone on with, tested, asked and exported."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import jax
import ml_dtypes
import numpy as np
import pytest
from commands import assert_refused, commands
from models.loading import write_safetensors
from safetensors.numpy import load_file

from jaxrl_llm.models import load_pretrained, save_pretrained
from jaxrl_llm.models.decoder import Decoder, to_parameters
from jaxrl_llm.models.weights import open_checkpoint
from jaxrl_llm.runs import find_run, load_adapter
from jaxrl_llm.sharding import MeshShape, make_mesh

pytestmark = pytest.mark.slow

FLAGS = (
    "--model base --recipe grpo --rollout.prompts 2 --learner.lora.rank 2 --learner.lora.targets attn/q mlp/down "
    "--learner.lora.base f32"
)
LINES = {
    "whole": f"train smoke {FLAGS} --steps 3 --run_dir whole",
    "half": f"train smoke {FLAGS} --steps 2 --run_dir broken",
    "rest": f"train smoke {FLAGS} --steps 3 --run_dir broken",
    "from": f"train smoke {FLAGS} --steps 1 --run_dir whole --from whole@2",
    "eval 2": "eval whole@2 --json",
    "eval": "eval whole --json",
    "export": "export whole --out model",
    "adapter": "export whole --out adapter --adapter --push someone/adapter",
    "eval export": "eval model --config smoke --json",
    "eval adapter": "eval adapter --config smoke --json",
    "over": f"train smoke {FLAGS.replace('model base', 'model adapter')} --steps 1 --run_dir over",
    "over adapter": "export over --out over_adapter --adapter",
    "push lost": "export whole --out lost --push someone/lost",
    "push name": "export whole --out pushed --push adapter",
    "push file": "export whole --out pushed.gguf --push someone/file",
    "packed": f"train smoke {FLAGS.replace('l base', 'l adapter').replace('f32', 'nf4')} --steps 2 --run_dir packed",
    "eval packed": "eval packed --json",
    "kept": f"train smoke {FLAGS.replace('l base', 'l fp8').replace('f32', 'fp8')} --steps 2 --run_dir kept",
    "eval kept": "eval kept --json",
    "export packed": "export packed --out packed_model",
    "eval packed_model": "eval packed_model --config smoke --json",
    "generate": "generate whole --temperature 0 --max_new_tokens 8 --prompt hello",
    "no rank": "train smoke --learner.lora.rank -1",
    "no target": "train smoke --learner.lora.rank 2 --learner.lora.targets embed",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    save_pretrained(*load_pretrained("tiny-random"), folder / "base")
    shutil.copytree(folder / "base", folder / "fp8")
    tensors = load_file(folder / "base/model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        # Codes up to half of the largest: packed again, they would be others.
        tensors[f"{name}_scale_inv"] = np.full((1, 1), np.abs(tensors[name]).max() / 224, np.float32)
        tensors[name] = (tensors[name] / tensors[f"{name}_scale_inv"]).astype(ml_dtypes.float8_e4m3fn)
    write_safetensors(folder / "fp8", tensors)
    return folder


class Hub(BaseHTTPRequestHandler):
    """What a client that uploads a folder asks of the hub; all that it sends is kept in ``told``, by address."""

    told: ClassVar[dict[str, tuple[str, list]]] = {}

    def do_GET(self):
        self.answer({"name": "someone", "type": "user"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        rows = [json.loads(line) for line in body.splitlines()]
        self.told[self.path] = self.headers["Authorization"], rows
        place = self.path.removeprefix("/api/models/").partition("/main")[0]
        if "lost" in place:
            self.answer({"error": "no room"}, 507)
        elif "preupload" in self.path:
            names = [file["path"] for file in rows[0]["files"]]
            self.answer({"files": [{"path": x, "uploadMode": "regular", "shouldIgnore": False} for x in names]})
        elif "commit" in self.path:
            self.answer({"commitUrl": f"{place}/commit/1", "commitOid": "1", "success": True})
        else:
            url = f"http://{self.headers['Host']}/someone/{rows[0].get('name')}"
            self.answer({"url": url, "errors": [], "warnings": []})

    def answer(self, value, code=200):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def hub():
    """The address of a hub on this machine, whatever proxy leads to others."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {"HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
        server.shutdown()


@pytest.fixture(scope="module")
def answers(folder, hub):
    return dict(zip(LINES, commands(list(LINES.values()), folder, **hub, HF_TOKEN="hf_mine"), strict=True))


def rows(path):
    """Metrics by step but for what the clock decides, and for the evaluation at the end of the first half."""
    clock = ("time/", "throughput/", "event/resumed", "eval/")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(clock)} for line in path.read_text().splitlines()
    ]


def test_a_resumed_run_goes_on_bit_for_bit(folder, answers):
    for name in ("whole", "half", "rest"):
        assert answers[name].code == 0, answers[name].err
    whole, broken = rows(folder / "whole/metrics.jsonl"), rows(folder / "broken/metrics.jsonl")
    assert whole == broken and len(whole) == 4
    assert whole[-1]["kl"] > 0 and whole[1]["sampler/logp_abs_diff_max"] < 1e-5


def test_a_run_begins_with_the_adapter_of_another(folder, answers):
    assert answers["from"].code == 0, answers["from"].err
    first = json.loads((folder / "whole-2/metrics.jsonl").read_text().splitlines()[0])
    found = json.loads(answers["eval 2"].out)
    assert {name: first[name] for name in first if name.startswith("eval/")} == {
        k: v for k, v in found.items() if "/" in k
    }
    assert "step 2 of" in answers["from"].err and "its weights and its optimiser" in answers["from"].err


def test_what_is_tested_asked_and_exported_is_the_adapted_model(folder, answers):
    for name in ("eval", "export", "eval export", "generate"):
        assert answers[name].code == 0, answers[name].err
    last = json.loads((folder / "whole/metrics.jsonl").read_text().splitlines()[-1])
    logged = {name: value for name, value in last.items() if name.startswith("eval/")}
    ours, theirs = (json.loads(answers[name].out) for name in ("eval", "eval export"))
    assert logged and {k: ours[k] for k in logged} == {k: theirs[k] for k in logged} == logged
    base, model = (to_parameters(load_pretrained(folder / name)[0])["blocks"] for name in ("base", "model"))
    moved = {f"{p}/{n}": float(np.abs(model[p][n] - base[p][n]).max()) for p in ("attn", "mlp") for n in base[p]}
    assert {name for name, size in moved.items() if size} == {"attn/q", "mlp/down"}
    assert min(moved["attn/q"], moved["mlp/down"]) > 1e-3


def test_a_run_on_a_packed_base_is_tested_and_exported_as_it_was_trained(folder, answers):
    for name in ("packed", "eval packed", "export packed", "eval packed_model"):
        assert answers[name].code == 0, answers[name].err
        assert "Warning" not in answers[name].err
    rows = [json.loads(line) for line in (folder / "packed/metrics.jsonl").read_text().splitlines()]
    assert rows[1]["sampler/logp_abs_diff_max"] < 1e-5
    logged = {name: value for name, value in rows[-1].items() if name.startswith("eval/")}
    for name in ("eval packed", "eval packed_model"):
        found = json.loads(answers[name].out)
        assert logged and {k: found[k] for k in logged} == logged
    base, model = (to_parameters(load_pretrained(folder / name)[0])["blocks"] for name in ("base", "packed_model"))
    assert np.abs(model["mlp"]["up"] - base["mlp"]["up"]).max() > 1e-3, "the numbers of the base are NF4's"


def test_an_exported_adapter_is_the_difference_of_base_and_model(folder, answers):
    assert answers["adapter"].code == 0, answers["adapter"].err
    said = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 2, 32.0)
    assert said["base_model_name_or_path"] == "base" and sorted(said["target_modules"]) == ["down_proj", "q_proj"]
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    base, model = (load_file(folder / name / "model.safetensors") for name in ("base", "model"))
    adapted = {name for name in base if not np.array_equal(base[name], model[name])}
    assert len(adapter) == 2 * len(adapted) > 0
    for name in adapted:
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
        assert a.shape == (2, base[name].shape[1]) and b.shape == (base[name].shape[0], 2)
        np.testing.assert_allclose(base[name] + 32.0 / 2 * b @ a, model[name], rtol=0, atol=1e-6)


def test_an_export_says_what_it_is(folder, answers):
    whole, adapter = ((folder / name / "README.md").read_text() for name in ("model", "adapter"))
    assert "base_model:" not in whole, "the hub knows no folder of this machine"
    assert "library_name: transformers" in whole and "library_name: peft" in adapter
    assert "Reinforcement learning by the recipe grpo from `base`" in whole and "step 3 of 3" in whole
    rows = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval/chain_sum/pass@1"] for row in (rows[0], rows[-1]))
    assert f"| eval/chain_sum/pass@1 | {before:.3f} | {after:.3f} |" in whole
    assert "jaxrl-llm eval whole\njaxrl-llm generate model" in whole and "generate adapter" in adapter


def test_an_exported_adapter_is_a_model_here(folder, answers):
    for name in ("eval adapter", "over"):
        assert answers[name].code == 0, answers[name].err
    whole, adapter = (json.loads(answers[name].out) for name in ("eval export", "eval adapter"))
    assert {k: v for k, v in adapter.items() if "/" in k} == {k: v for k, v in whole.items() if "/" in k}
    first = json.loads((folder / "over/metrics.jsonl").read_text().splitlines()[0])
    assert first["eval/chain_sum/pass@1"] == adapter["eval/chain_sum/pass@1"], "a run begins with the sum"


def test_an_adapter_over_another_precision_of_its_base_is_trained_with_a_warning(folder, answers):
    assert "adapter was trained over base in f32, and its base is in nf4 here" in answers["packed"].err
    assert "trained over" not in answers["over"].err
    assert "as low-rank adapters over the base in f32" in (folder / "adapter/README.md").read_text()


def test_a_base_that_is_stored_packed_is_the_same_wherever_the_run_is_read(folder, answers):
    stored = open_checkpoint(folder / "fp8")["model.layers.1.mlp.up_proj.weight"].read()
    base, _, _ = load_adapter(find_run(str(folder / "kept")), make_mesh(MeshShape(), jax.devices()[:1]))
    np.testing.assert_array_equal(base.weights.blocks.mlp.up.codes[1], stored.T)
    assert answers["kept"].code == answers["eval kept"].code == 0, answers["kept"].err + answers["eval kept"].err
    last = json.loads((folder / "kept/metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(answers["eval kept"].out)["eval/chain_sum/pass@1"] == last["eval/chain_sum/pass@1"]


def test_an_adapter_over_an_adapter_is_not_exported(answers):
    lacks = "the adapter of over belongs to adapter, and PEFT would add it to base, without that adapter"
    assert_refused(answers["over adapter"], f"{lacks}: export the whole model, without --adapter")


def test_an_export_is_pushed_with_its_card_and_the_token(folder, hub, answers):
    assert answers["adapter"].code == 0 and f"{hub['HF_ENDPOINT']}/someone/adapter" in answers["adapter"].out
    token, (created,) = Hub.told["/api/repos/create"]
    token, (header, *files) = Hub.told["/api/models/someone/adapter/commit/main"]
    assert token == "Bearer hf_mine" and "private" in (created.get("visibility"), *created), "however it is written"
    assert header["value"]["summary"] == "whole, step 3"
    sent = {file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in files}
    assert sent == {path.name: path.read_bytes() for path in (folder / "adapter").iterdir()} and "README.md" in sent


def test_a_push_that_fails_leaves_the_folder_and_says_how_to_go_on(folder, answers):
    lost = answers["push lost"]
    assert lost.code == 2 and (folder / "lost/model.safetensors").is_file()
    assert "cannot push to someone/lost" in lost.err and "hf upload someone/lost lost --private" in lost.err


def test_a_push_without_a_name_a_folder_or_a_token_is_refused_before_it_begins(folder, hub, answers):
    assert_refused(answers["push name"], "--push adapter is not a repository of the hub: give USER/NAME")
    assert_refused(answers["push file"], "--push uploads a folder, and --out pushed.gguf is a file")
    (nobody,) = commands(["export whole --out pushed --push someone/x"], folder, **hub, HF_HOME=str(folder / "hf"))
    assert_refused(nobody, "--push someone/x needs a token that may write there: set HF_TOKEN, or hf auth login")
    assert not (folder / "pushed").exists()


def test_a_run_is_not_continued_beside_another_base(folder, answers):
    assert answers["rest"].code == 0
    model, tokenizer = load_pretrained("tiny-random")
    (folder / "base").rename(folder / "before")
    parameters = to_parameters(model)
    other = parameters | {"embed": parameters["embed"].at[3, 4].add(1e-3)}
    save_pretrained(Decoder(model.config, other), tokenizer, folder / "base")
    longer, asked = commands(
        [f"train smoke {FLAGS} --steps 4 --run_dir broken", "generate broken --prompt hello"], folder
    )
    assert_refused(asked, "trained on another model", "embed differs")
    assert longer.code == 2 and "Traceback" not in longer.err
    refusal = "model: base is not as it was when broken began (its weights have changed): put it back, or begin a new"
    assert refusal in longer.err.splitlines()[-1]


def test_what_cannot_be_adapted_is_refused(answers):
    assert_refused(answers["no rank"], "learner.lora.rank must be at least 0")
    assert_refused(answers["no target"], "learner.lora.targets must be some of attn/q,", "got embed")
