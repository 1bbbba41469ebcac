"""Stream several answers at once from an engine process of our own, as a web service would.

python examples/service.py
"""

import asyncio

from paceline import AsyncLLM


async def tell(llm: AsyncLLM, topic: str) -> str:
    text = ""
    async for delta in llm.stream_chat([{"role": "user", "content": f"One sentence about {topic}."}], max_tokens=40):
        text += delta.text  # a service would send this on
    return text


async def main() -> None:
    async with AsyncLLM("smollm2-135m", kv_gib=0.5) as llm:
        for text in await asyncio.gather(*(tell(llm, topic) for topic in ("rivers", "bridges", "boats"))):
            print(text)


asyncio.run(main())
