"""Before any test module imports torch: threads that wait must not spin, here and in every process a test starts.

Tests run ranks, servers and Ray workers side by side on two cores; spinning, one idle process slows the others by far
more than its own work costs.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
