"""Names of the engine's tool and reasoning parsers.

They are listed here because the command line checks a kvasir.yaml on machines without vLLM.
tests/contract/test_vllm_parsing_hooks.py compares them with vLLM's registries.
"""

from __future__ import annotations

import difflib

_TOOL_PARSERS = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41
dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf
hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json
llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral muse_glimmer olmo3
openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3
step3p5 xlam
"""

_REASONING_PARSERS = """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45
glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2
kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral muse_glimmer
nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 step3p5
"""

TOOL_PARSERS = _TOOL_PARSERS.split()
REASONING_PARSERS = _REASONING_PARSERS.split()

NO_PARSER = "none"
"""In a spec: no parser, whatever the model's files call for."""

_NEAR = 4


def closest_matches(name: str, known: list[str]) -> str:
    """Return a suggestion for the unknown `name`: `choose a or b`, or all of `known`."""
    close = difflib.get_close_matches(name.lower(), known, n=_NEAR, cutoff=0.5)
    family = [each for each in known if each.startswith(name.lower().split("_")[0][:4]) and each not in close]
    offered = (close + family)[:_NEAR]
    return f"choose {' or '.join(offered)}" if offered else f"choose one of {', '.join(known)}"
