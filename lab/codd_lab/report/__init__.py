"""An evaluation as one HTML page: tables, figures, comparisons."""
