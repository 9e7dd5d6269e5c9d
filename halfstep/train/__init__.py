"""Pretraining, SFT, DPO and KTO in mixed precision, with the precision that fits the machine."""
