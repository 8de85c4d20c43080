"""Reporting of a run: metrics to files and services, progress on the terminal, statistics, the report page. Import what
you need from its module: `metrics.MetricsLogger`, `progress.Progress`, `stats.pass_at_k`, `report.write_report`. None
of them imports torch."""
