# The alerts of ../prometheus, the acceptance rate's among them, in Amazon Managed Prometheus.

resource "aws_prometheus_workspace" "this" {
  alias = var.name
}

resource "aws_prometheus_rule_group_namespace" "alerts" {
  name         = var.name
  workspace_id = aws_prometheus_workspace.this.id
  data         = replace(file("${path.module}/../prometheus/alerts.yml"), "< 0.6\n", "< ${var.min_acceptance_rate}\n")
}

resource "aws_prometheus_alert_manager_definition" "this" {
  workspace_id = aws_prometheus_workspace.this.id
  definition = yamlencode({
    alertmanager_config = yamlencode({
      route = {
        receiver        = "sns"
        group_by        = ["alertname", "model_name"]
        repeat_interval = "4h"
      }
      receivers = [{
        name = "sns"
        sns_configs = [{
          topic_arn = aws_sns_topic.alarms.arn
          sigv4     = { region = var.region }
        }]
      }]
    })
  })
  depends_on = [aws_sns_topic_policy.alarms]
}

resource "aws_sns_topic" "alarms" {
  name = "${var.name}-alarms"
}

resource "aws_sns_topic_subscription" "email" {
  count     = var.alarm_email == "" ? 0 : 1
  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

data "aws_iam_policy_document" "alarms" {
  statement {
    sid       = "AlertManager"
    actions   = ["sns:Publish", "sns:GetTopicAttributes"]
    resources = [aws_sns_topic.alarms.arn]
    principals {
      type        = "Service"
      identifiers = ["aps.amazonaws.com"]
    }
    condition {
      test     = "ArnEquals"
      variable = "aws:SourceArn"
      values   = [aws_prometheus_workspace.this.arn]
    }
  }
  statement {
    sid       = "CloudWatch"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alarms.arn]
    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com"]
    }
    condition {
      test     = "ArnEquals"
      variable = "aws:SourceArn"
      values   = [aws_cloudwatch_metric_alarm.unhealthy.arn]
    }
  }
}

resource "aws_sns_topic_policy" "alarms" {
  arn    = aws_sns_topic.alarms.arn
  policy = data.aws_iam_policy_document.alarms.json
}

# The one that also goes off when no metrics come any more.
resource "aws_cloudwatch_metric_alarm" "unhealthy" {
  alarm_name          = "${var.name}-no-healthy-server"
  alarm_description   = "The load balancer finds no healthy server of ${var.name}."
  namespace           = "AWS/ApplicationELB"
  metric_name         = "HealthyHostCount"
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 3
  threshold           = 1
  comparison_operator = "LessThanThreshold"
  treat_missing_data  = "breaching"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  dimensions = {
    LoadBalancer = aws_lb.this.arn_suffix
    TargetGroup  = aws_lb_target_group.http.arn_suffix
  }
}
