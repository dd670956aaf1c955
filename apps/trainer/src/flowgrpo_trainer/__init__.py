"""The FlowGRPO trainer: command line, preflight, recipes, Ray wiring, the loop, reports."""
