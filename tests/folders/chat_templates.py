"""Chat templates in the shapes of publishers' own: how turns are framed, where tools and calls stand, what a template reads."""


def _template(
    turn: str,
    end: str,
    ask: str,
    tools: str = "",
    call: str = "{{ c.function | tojson }}",
    begin: str = "",
    model: str = "assistant",
) -> str:
    """turn: opens one, {{ role }} in it; ask: what the answer follows; tools: said before the turns where there are tools."""
    offered = f"{{% if tools %}}{tools}{{% endif %}}" if tools else ""
    role = f"{{% set role = '{model}' if m.role == 'assistant' else m.role %}}"
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    turns = f"{{% for m in messages %}}{role}{turn}{{{{ m.content or '' }}}}{calls}{end}{{% endfor %}}"
    return f"{begin}{offered}{turns}{{% if add_generation_prompt %}}{ask}{{% endif %}}"


LIST = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
HERMES = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
SAY_HERMES = 'Calls as <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>\n'
XML = "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
PAIRS = "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
IM = "<|im_start|>{{ role }}\n"
# fmt: off
TEMPLATES = {
    "chatml": _template(IM, "<|im_end|>\n", "<|im_start|>assistant\n", IM.replace("{{ role }}", "system") + SAY_HERMES + LIST + "<|im_end|>\n", HERMES),
    "qwen3": _template(IM, "<|im_end|>\n", "<|im_start|>assistant\n" + THINKING, IM.replace("{{ role }}", "system") + SAY_HERMES + LIST + "<|im_end|>\n", HERMES),
    "qwen3-coder": _template(IM, "<|im_end|>\n", "<|im_start|>assistant\n<think>\n", IM.replace("{{ role }}", "system") + LIST + "<|im_end|>\n", XML),
    "llama3": _template(
        "<|start_header_id|>{{ role }}<|end_header_id|>\n\n", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n",
        'Respond with {"name": name, "parameters": arguments}.\n' + LIST, '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}', "{{ bos_token }}",
    ),
    "llama4": _template("<|header_start|>{{ role }}<|header_end|>\n\n", "<|eot|>", "<|header_start|>assistant<|header_end|>\n\n", "[f(a=1)]\n" + LIST, begin="{{ bos_token }}"),
    "mistral": (
        "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral-old": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": _template("<start_of_turn>{{ role }}\n", "<end_of_turn>\n", "<start_of_turn>model\n", begin="{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}", model="model"),
    "gemma4": _template("<|turn>{{ role }}\n", "<turn|>\n", "<|turn>model\n", "<|tool>" + LIST + "<tool|>", "<|tool_call>call:{{ c.function.name }}{<tool_call|>", "{{ bos_token }}", "model"),
    "phi3": _template("<|{{ role }}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _template("<|im_start|>{{ role }}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "harmony": _template("<|start|>{{ role }}<|message|>", "<|end|>", "<|start|>assistant", "<|start|>developer<|message|>" + LIST + "<|end|>", "<|channel|>commentary to=functions.{{ c.function.name }}<|message|>{{ c.function.arguments | tojson }}<|call|>", "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    ),
    "deepseek-r1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
        "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
    ),
    "kimi": _template("<|im_user|>{{ role }}<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>", "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>", "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"),
    "glm": _template("<|{{ role }}|>\n", "", "<|assistant|>\n<think></think>\n", "<|system|>\n" + LIST, PAIRS, "[gMASK]<sop>"),
    "minimax": _template("]~b]{{ role }}\n", "[e~[\n", "]~b]ai\n<think>\n", "]~b]tools\n" + LIST + "[e~[\n", '<minimax:tool_call><invoke name="{{ c.function.name }}"></invoke></minimax:tool_call>', "]~!b[", "ai"),
    "granite": _template("<|start_of_role|>{{ role }}<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>", "<|start_of_role|>tools<|end_of_role|>" + LIST + "<|end_of_text|>\n", "<|tool_call|>[{{ c.function | tojson }}]"),
    "nemotron": _template("<SPECIAL_10>{{ role }}\n", "<SPECIAL_12>\n", "<SPECIAL_11>Assistant\n<think>\n", "<AVAILABLE_TOOLS>" + LIST + "</AVAILABLE_TOOLS>\n", "<TOOLCALL>[{{ c.function | tojson }}]</TOOLCALL>"),
    "olmo": _template("<|{{ role }}|>\n", "\n", "<|assistant|>\n", begin="{{ bos_token }}"),
    "smollm3": _template(IM, "<|im_end|>\n", "<|im_start|>assistant\n" + THINKING, "{% if xml_tools %}" + SAY_HERMES + "{% endif %}" + LIST, HERMES),
    "falcon3": _template("<|{{ role }}|>\n", "\n", "<|assistant|>\n", SAY_HERMES + LIST, HERMES),
    "lfm2": _template(IM, "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_start|>system\nList of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>\n", "<|tool_call_start|>[{{ c.function.name }}()]<|tool_call_end|>", "{{ bos_token }}"),
    "cohere": _template("<|START_OF_TURN_TOKEN|><|{{ role | upper }}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", begin="{{ bos_token }}", model="chatbot"),
    "cohere-tools": _template("<|START_OF_TURN_TOKEN|><|{{ role | upper }}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Action:", LIST, begin="{{ bos_token }}", model="chatbot"),
    "exaone": _template("[|{{ role }}|]\n", "[|endofturn|]\n", "[|assistant|]\n", "[|system|]\n" + SAY_HERMES + LIST + "[|endofturn|]\n", HERMES),
    "seed": _template("<seed:bos>{{ role }}\n", "<seed:eos>", "<seed:bos>assistant\n", "<seed:bos>system\n" + LIST + "<seed:eos>", "<seed:tool_call><function={{ c.function.name }}></function></seed:tool_call>"),
    "ernie": _template("{{ role | title }}: ", "\n", "Assistant: ", begin="<|begin_of_sentence|>"),
    "hunyuan": (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}<｜hy_User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
        "<｜hy_Assistant｜>{{ m.content }}{{ eos_token }}{% else %}{{ m.content }}<｜hy_place▁holder▁no▁3｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜hy_Assistant｜>{% endif %}"
    ),
    "zephyr": _template("<|{{ role }}|>\n", "{{ eos_token }}\n", "<|assistant|>\n"),
}
