"""Answer a batch of prompts in this process, without a server.

python examples/batch.py
"""

from paceline import LLM

questions = [f"What is {n} plus {n}?" for n in range(1, 5)]

with LLM("smollm2-135m", kv_gib=0.5) as llm:
    for question, answer in zip(questions, llm.generate(questions, temperature=0, max_tokens=24), strict=True):
        print(f"{question} -> {answer.text.strip()!r} ({answer.finish_reason}, {len(answer.tokens)} tokens)")
