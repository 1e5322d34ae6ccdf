"""mini-swe-agent mends a toy repository: `python examples/programs/mini_swe_agent.py MODEL OUTPUT_DIR`.

Needs `pip install mini-swe-agent`. The commands of the model run in groupgrad's sandbox.
"""

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from run import train

from groupgrad.integrations.code_sandbox.shell import SandboxedShell

SYSTEM = "You mend code with bash. Answer with one command:\n```mswea_bash_command\ncat add.py\n```"
CHECK = "python3 -c 'from add import add; assert add(2, 3) == 5'"


class Repository(LocalEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.shell = SandboxedShell({"add.py": "def add(a, b):\n    return a - b\n"})

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
        status, output = self.shell.run(action["command"])
        done = {"output": output, "returncode": status, "exception_info": ""}
        self._check_finished(done)
        return done


def solve(row: dict, session) -> float:
    reached = {"api_base": session.base_url, "api_key": session.api_key, "max_tokens": 64}
    name, repository = f"openai/{session.model}", Repository()
    model = LitellmTextbasedModel(model_name=name, model_kwargs=reached, cost_tracking="ignore_errors")
    agent = DefaultAgent(model, repository, system_template=SYSTEM, instance_template="{{task}}", step_limit=2)
    agent.run("add.py subtracts. Make it add.")
    return float(repository.shell.run(CHECK).status == 0)


if __name__ == "__main__":
    train(solve, max_completion_length=256)
