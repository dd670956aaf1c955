"""The formulas of FlowGRPO: SDE transitions, log-probs, advantages, clipped loss; torch reference and Triton kernels."""
