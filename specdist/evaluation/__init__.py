"""Measures a drafter: acceptance, speed and fidelity, and the report that people and the gate read."""
