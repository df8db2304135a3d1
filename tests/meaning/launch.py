"""``everstep`` as a script, so that it may be a fork of the server (``python -X fork``)."""

import sys

from everstep.cli.main import main

sys.exit(main())
