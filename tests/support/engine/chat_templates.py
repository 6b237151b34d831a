"""Chat templates with the structure of well-known models' templates, written for these tests, and their special tokens.

Each keeps the rules that decide which tokens are learned: the parts of a turn, what is dropped when more messages
follow, the content of the generation prompt, and what the template refuses.
"""

from dataclasses import dataclass

# Qwen2.5: ChatML with a default system prompt. Tool results are in user turns; earlier turns never change.
QWEN2_5 = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{%- else %}{% set system = 'Be helpful.' %}{% endif %}"
    "<|im_start|>system\n{{ system }}"
    "{%- if tools %}{{ '\n<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools>' }}"
    "{%- endif %}<|im_end|>{{ '\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Qwen3: reasoning in <think>, from `reasoning_content` or the content, is shown only after the user's last question.
# The last answer has an empty <think> block if it had no reasoning.
_QWEN3 = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}"
    "<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}"
    "{%- set ns = namespace(question=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set reasoning = m.reasoning_content or '' %}"
    "{%- if not reasoning and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.question and (loop.last or reasoning) %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- if content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{%- if call.function.arguments is string %}{{ call.function.arguments }}"
    "{%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\nPROMPT' }}{% endif %}"
)
QWEN3 = _QWEN3.replace("PROMPT", "")
QWEN3_THINKING = _QWEN3.replace("PROMPT", "<think>\n")  # its generation prompt opens the reasoning

# Llama 3: headers and trimmed contents. A message has one tool call instead of content; tool results are JSON.
LLAMA3 = (
    "{{- bos_token }}{% for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls, please') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- else %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if tools and m.role == 'user' and loop.index0 < 2 %}"
    "{%- for tool in tools %}{{ (tool | tojson(indent=2)) + '\n\n' }}{% endfor %}{% endif %}"
    "{{- (m.content | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Llama 3.2: as Llama 3, with the current day in the system prompt.
LLAMA3_WITH_DAY = "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') }}" + LLAMA3

# Gemma 2: user and model turns alternate; no system prompt.
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim"
    " + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Gemma 3: the system prompt begins the user's first turn.
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ (m.content | trim) + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Mistral: no generation prompt. The system prompt and the tools are in the last question; call ids have nine
# characters.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{%- else %}{% set rest = messages %}{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{- bos_token }}{% for m in rest %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}"
    "{{- '[INST] ' + (system + '\n\n' if system is defined and loop.index0 == ns.last else '') + m.content"
    " + '[/INST]' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls is defined %}"
    "{{- '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' + ('' if loop.last else ', ') }}{% endfor %}"
    "{{- ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + (m.content | trim) + eos_token }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{ raise_exception('Only user, assistant and tool roles') }}{% endif %}{% endfor %}"
)

# Phi-3: each turn has its own end token. End-of-text closes the conversation unless there is a generation prompt.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

# gpt-oss: channels. The last answer ends with <|return|>, earlier ones with <|end|>. Reasoning is kept for the last
# answer, and for tool calls that no answer has followed yet. The system prompt has the current day.
GPT_OSS = (
    "{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{%- if messages[0].role in ['developer', 'system'] %}"
    "{%- set instructions = messages[0].content %}{% set rest = messages[1:] %}"
    "{%- else %}{% set instructions = '' %}{% set rest = messages %}{% endif %}"
    "{%- if instructions or tools %}{{ '<|start|>developer<|message|>' + instructions }}"
    "{%- for tool in tools or [] %}{{ '\ntype ' + tool.function.name + ' = () => any;' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{%- set ns = namespace(called=none, answer=false) %}"
    "{%- for m in rest %}"
    "{%- if m.role == 'assistant' and 'tool_calls' in m %}"
    "{%- set ns.answer = false %}"
    "{%- for later in rest[loop.index:] %}"
    "{%- if later.role == 'assistant' and 'tool_calls' not in later %}{% set ns.answer = true %}{% endif %}{% endfor %}"
    "{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{%- if not ns.answer and (m.content or m.thinking) %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}{% set ns.called = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- (call.arguments | tojson) + '<|call|>' }}"
    "{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in m %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if ns.called is none %}{{ raise_exception('tool role without a call before it') }}{% endif %}"
    "{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- (m.content | tojson) + '<|end|>' }}"
    "{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# DeepSeek R1: reasoning is cut from the content of every answer. Arguments are concatenated as text, and missing
# content is None, not ''. The generation prompt opens the reasoning, but there is none after tool results.
DEEPSEEK_R1 = (
    "{%- set ns = namespace(after_tool=false, system='') %}"
    "{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
    "{{- bos_token + ns.system }}{% for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.after_tool = false %}{{ '<｜User｜>' + m.content }}{% endif %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{{ '<｜Assistant｜><｜calls｜>' }}"
    "{%- for call in m.tool_calls %}"
    "{{- '<｜call｜>' + call.function.name + '\n' + call.function.arguments + '<｜/call｜>' }}{% endfor %}"
    "{{- '<｜/calls｜><｜eos｜>' }}{% endif %}"
    "{%- if m.role == 'assistant' and m.content is not none %}"
    "{%- if ns.after_tool %}{{ '<｜/outputs｜>' + m.content + '<｜eos｜>' }}{% set ns.after_tool = false %}"
    "{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜eos｜>' }}{% endif %}{% endif %}"
    "{%- if m.role == 'tool' %}"
    "{{- ('' if ns.after_tool else '<｜outputs｜>') + '<｜output｜>' + m.content + '<｜/output｜>' }}"
    "{%- set ns.after_tool = true %}{% endif %}{% endfor %}"
    "{%- if ns.after_tool %}{{ '<｜/outputs｜>' }}{% endif %}"
    "{%- if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

# DeepSeek V3.1: no reasoning. Every answer to the user begins with </think>, which is in the generation prompt.
DEEPSEEK_V3_1 = (
    "{%- set ns = namespace(asked=false, system='') %}"
    "{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
    "{{- bos_token + ns.system }}{% for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.asked = true %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'tool' %}{{ '<｜output｜>' + m.content + '<｜/output｜>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if ns.asked %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.asked = false %}"
    "{{- m.content if m.content is not none else '' }}"
    "{%- if m.tool_calls is defined %}{{ '<｜calls｜>' }}{% for call in m.tool_calls %}"
    "{{- '<｜call｜>' + call.function.name + '<｜sep｜>' + call.function.arguments + '<｜/call｜>' }}{% endfor %}"
    "{{- '<｜/calls｜>' }}{% endif %}{{ '<｜eos｜>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt and ns.asked %}{{ '<｜Assistant｜></think>' }}{% endif %}"
)

# Qwen3's structure with generation marks: answers without earlier reasoning, all in one example.
MARKED_DROPPING_REASONING = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}"
    "{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{- m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    *("<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜eos｜>", "<｜calls｜>", "<｜/calls｜>", "<｜outputs｜>", "<｜/outputs｜>"),
    *("<bos>", "</s>"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family's template, and the tokens that begin and end its text."""

    template: str
    bos: str = "<bos>"
    eos: str = "</s>"


FAMILIES = {
    "qwen2.5": Family(QWEN2_5),
    "qwen3": Family(QWEN3),
    "qwen3-thinking": Family(QWEN3_THINKING),
    "llama3": Family(LLAMA3),
    "llama3-day": Family(LLAMA3_WITH_DAY),
    "gemma2": Family(GEMMA2),
    "gemma3": Family(GEMMA3),
    "mistral": Family(MISTRAL),
    "phi3": Family(PHI3),
    "gpt-oss": Family(GPT_OSS),
    "deepseek-r1": Family(DEEPSEEK_R1),
    "deepseek-v3.1": Family(DEEPSEEK_V3_1),
}
