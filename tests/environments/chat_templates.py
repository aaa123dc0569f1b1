"""Chat templates of several manners, each with the tokens of its tokenizer, and tokenizers of bytes for them."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}, "b": {"type": "string"}},
            "required": ["a"],
        },
    },
}

_TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
HERMES = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + _ASKS
)
FORGETFUL = HERMES.replace(
    "{{ m.content }}" + _CALLS,
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}"
    "{% endif %}" + _CALLS,
)
"""Drops the reasoning of all replies but the last."""
COUNTED = (
    "{{ messages | length // 4 }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Rewrites its first line where a chat has five messages, so before the third reply."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}<|head|>user<|/head|>\n\n"
    '{% if loop.first and tools %}Reply with {"name": name, "parameters": dictionary of values}.'
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '<|head|>assistant<|/head|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|head|>ipython<|/head|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
"""Takes one call, and writes results as JSON."""
GEMMA = (
    "{% if tools %}<|turn>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    '<|tool_response>response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>'
    "{% else %}{% if not (m.role == 'assistant' and not loop.first and messages[loop.index0 - 1].role == 'tool') %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    '{% for k, v in c.function.arguments | items %}{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}'
    "{{ v | tojson }}{% endif %}{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>{% endfor %}"
    "{{ m.content }}{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
"""Goes on in the same turn after results; the mark of the next result ends a call."""
HARMONY = (
    "{% set last = namespace(name='') %}"
    "<|start|>system<|message|>{% if tools %}{{ tools | tojson }}{% endif %}<|end|>{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary "
    "json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Ends the last reply with a stop token and earlier ones with another; results are named after the call."""
DEEPSEEK = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.content is not string %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments + '' }}\n```"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end｜>"
    "{% else %}{{ '<｜tool▁outputs▁end｜>' if messages[loop.index0 - 1].role == 'tool' else '<｜Assistant｜>' }}"
    "{{ m.content }}<｜end｜>{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<｜tool▁outputs▁end｜>"
    "{% elif add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
"""Takes arguments as text, and no content beside calls."""
GLM = (
    "[gMASK]{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}{{ '\n' }}"
    "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Ends no reply: the next head does, and is a stop token."""

TEMPLATES = {
    "hermes": (HERMES, ("<|im_end|>",)),
    "llama": (LLAMA, ("<|eot_id|>", "<|eom_id|>")),
    "gemma": (GEMMA, ("<turn|>", "<|tool_response>")),
    "gpt_oss": (HARMONY, ("<|return|>", "<|call|>")),
    "deepseek": (DEEPSEEK, ("<｜end｜>",)),
    "glm": (GLM, ("<eos>", "<|user|>", "<|observation|>")),
}
"""Templates and their stop tokens, by the syntax of their calls."""
WRITTEN = (
    "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot_id|>", "<|eom_id|>", "<|turn>", "<turn|>",
    "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|start|>", "<|end|>",
    "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@functools.cache
def byte_tokenizer(eos="<eos>", merges=(), rstrip=False):
    """A tokenizer of bytes with all control tokens of the templates here, and tokens of texts that are not special.

    ``rstrip``: control tokens take the white space after them.
    """
    special = ["<bos>", "<eos>", *WRITTEN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False, rstrip=rstrip) for token in special]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos)
