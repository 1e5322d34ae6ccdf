"""An agent of smolagents that writes Python: `python examples/programs/smolagents_code_agent.py MODEL OUTPUT_DIR`.

Needs `pip install smolagents`. Its code runs in groupgrad's sandbox. The agent rewrites the model's answers, so each
turn is a branch, whose history is computed once.
"""

import shlex

from run import is_right, train
from smolagents import CodeAgent, OpenAIModel
from smolagents.local_python_executor import CodeOutput, PythonExecutor

from groupgrad.integrations.code_sandbox.shell import SandboxedShell

SYSTEM = "Solve the task in Python. Answer only with\n<code>\nfinal_answer(1 + 2)\n</code>"
FINAL = "def final_answer(value):\n    open('final', 'w').write(str(value))\n"


class SandboxedPython(PythonExecutor):
    def __init__(self) -> None:
        self.shell = SandboxedShell({})

    def send_tools(self, tools: dict) -> None: ...

    def send_variables(self, variables: dict) -> None: ...

    def __call__(self, code_action: str) -> CodeOutput:
        _, output = self.shell.run(f"python3 -c {shlex.quote(FINAL + code_action)}")
        return CodeOutput(self.shell.files.get("final"), output, "final" in self.shell.files)


def solve(row: dict, session) -> float:
    model = OpenAIModel(session.model, api_base=session.base_url, api_key=session.api_key, max_tokens=48)
    agent = CodeAgent([], model, executor=SandboxedPython(), max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = SYSTEM
    return is_right(agent.run(row["question"]), row["answer"])


if __name__ == "__main__":
    train(solve, max_completion_length=256)
