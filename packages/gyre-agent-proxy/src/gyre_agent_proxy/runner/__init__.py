"""The runner: dispatches groups of executions, holds them to their budgets and scores what they leave."""
